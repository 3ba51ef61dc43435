"""The site: every page and every public name is in it, and it builds offline.

The build takes ten seconds of one core. It leaves the notebooks as they are, which
`make docs` executes. Without the extra `docs` the tests that build are skipped.
"""

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxcomm

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NEEDED = ("sphinx", "furo", "myst_nb")
needs_sphinx = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, NEEDED)), reason="needs jaxcomm[docs]"
)


def build(root, *words):
    return subprocess.run(
        [sys.executable, "-P", "-m", "sphinx", "-c", "docs", "-q", "-E", "-n", *words],
        cwd=root,
        env=os.environ
        | {"DOCS_NOTEBOOKS": "off", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """Returns the folder of the site, built with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    run = build(ROOT, "-W", "--keep-going", ".", folder)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


@pytest.fixture(scope="session")
def names():
    spec = importlib.util.spec_from_file_location("names", DOCS / "_names.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_contents():
    listed = set(re.findall(r"^docs/(.+)$", (DOCS / "contents.md").read_text(), re.M))
    files = [*DOCS.rglob("*.md"), *DOCS.glob("*.ipynb")]
    pages = {str(p.relative_to(DOCS).with_suffix("")) for p in files}
    assert listed == pages - {"contents"}


def test_classes_that_users_receive_are_public(names):
    public = {name for name, _ in names.public_objects()}
    assert {f"jaxcomm.{name}" for name in names.RETURNED} <= public


def documented(site):
    """Return the anchors of the pages of docs/api."""
    pages = [p.read_text() for p in (site / "docs" / "api").glob("*.html")]
    return set(re.findall(r'<dt [^>]*id="([\w.]+)"', "".join(pages)))


@needs_sphinx
def test_the_pages_document_every_public_name(site, names):
    exported = {
        f"jaxcomm.{name}"
        for name in jaxcomm.__all__
        if not inspect.ismodule(getattr(jaxcomm, name))
    }
    public = {name for name, _ in names.public_objects()}
    assert exported <= public
    assert public - documented(site) == set()


@needs_sphinx
def test_the_site_shows_command_lines_notebooks_and_the_readme_first(site):
    text = (site / "docs" / "api" / "command-line.html").read_text()
    assert "usage: python -m jaxcomm.launch" in text
    assert "usage: python -m jaxcomm.doctor" in text
    text = (site / "index.html").read_text()
    assert "docs/attention.html" in text
    assert "notebooks/01_first_collective.html" in text
    lines = (site / "external-links.txt").read_text().splitlines()
    links = [line.split()[0] for line in lines]
    assert "https://semver.org" in links
    assert links == sorted(set(links))


@needs_sphinx
def test_pages_load_nothing_from_elsewhere(site):
    loads = re.compile(
        r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="(?:https?:)?//[^>]*'
    )
    found = [(p.name, *loads.findall(p.read_text())) for p in site.rglob("*.html")]
    assert [entry for entry in found if len(entry) > 1] == []
