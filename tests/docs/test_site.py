"""The site: every public name is in it, and it builds offline without a warning.

A page in no table of contents and a link that leads nowhere are warnings. The build
takes ten seconds of one core. It leaves the notebooks as they are, which `make docs`
executes.
"""

import importlib.util
import inspect
import os
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxcomm

ROOT = Path(__file__).parents[2]
NEEDED = ("sphinx", "furo", "myst_nb")


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, NEEDED)), reason="needs jaxcomm[docs]"
)
def test_the_site_builds_and_documents_every_public_name(tmp_path):
    words = ["-c", "docs", "-q", "-E", "-n", "-W", "--keep-going", "."]
    run = subprocess.run(
        [sys.executable, "-P", "-m", "sphinx", *words, tmp_path],
        cwd=ROOT,
        env=os.environ
        | {"DOCS_NOTEBOOKS": "off", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    spec = importlib.util.spec_from_file_location("names", ROOT / "docs" / "_names.py")
    names = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(names)
    public = {name for name, _ in names.public_objects()}
    exported = {
        f"jaxcomm.{name}"
        for name in jaxcomm.__all__
        if not inspect.ismodule(getattr(jaxcomm, name))
    }
    assert exported <= public
    pages = [p.read_text() for p in (tmp_path / "docs" / "api").glob("*.html")]
    documented = re.findall(r'<dt [^>]*id="([\w.]+)"', "".join(pages))
    assert public - set(documented) == set()
    for name in "dot_product_attention", "ring_attention":
        shown = re.findall(
            rf'<dt [^>]*id="jaxcomm.{name}">.*?</dt>', "".join(pages), re.S
        )
        assert len(shown) == 1
        arguments = re.findall(
            r'class="sig-param"><span class="n"><span[^>]*>(\w+)', shown[0]
        )
        assert arguments == list(inspect.signature(getattr(jaxcomm, name)).parameters)
        assert re.search("query: '?Array", pydoc.render_doc(getattr(jaxcomm, name)))
    assert "docs.jax.dev/en/latest/_autosummary/jax.Array.html" in "".join(pages)
    assert "Return type:Request" not in re.sub(r"<[^>]+>|\s{2,}|\n", "", "".join(pages))
