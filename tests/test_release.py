"""The parts of a release agree."""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_the_changelog_names_the_version_that_is_built():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    sections = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert sections[0] == "Unreleased"
    dated = rf"{re.escape(version)}, (\d{{4}}-\d\d-\d\d|not released yet)"
    assert re.fullmatch(dated, sections[1])


@pytest.fixture
def installed():
    try:
        return importlib.metadata.distribution("jaxcomm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("jaxcomm is not installed: make install")


def test_the_package_carries_every_licence_and_no_dead_link(installed):
    found = {
        Path(file).name: file.read_text()
        for file in installed.files
        if ".dist-info/licenses/" in str(file)
    }
    expected = [ROOT / "LICENSE", ROOT / "NOTICE", *(ROOT / "licenses").glob("*.txt")]
    assert len(expected) == 7
    assert found == {path.name: path.read_text() for path in expected}
    # Nor does a package index show a link that leads nowhere.
    description = installed.metadata.get_payload()
    assert "# jaxcomm" in description
    assert re.findall(r"\]\((?!https?:)[^)]*\)", description) == []


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("print('fine')", "passed"),
        ("print('Python 3.9: NOT RUN, none here')", "Python 3.9: NOT RUN, none here"),
        ("raise SystemExit(3)", "FAILED: status 3"),
    ],
)
def test_a_check_that_ran_in_part_has_not_passed(
    program, verdict, monkeypatch, tmp_path
):
    monkeypatch.syspath_prepend(ROOT / "tools")
    release = importlib.import_module("release.__main__")
    monkeypatch.setattr(release.env, "WORK", tmp_path)
    check = release.Check("a check", [sys.executable, "-c", program])
    assert release.attempt("it", check)[0].startswith(verdict)


def test_what_is_run_on_an_installed_wheel_is_there():
    """pytest says "no tests ran" of all if one of its paths is missing."""
    text = (ROOT / "tools" / "release" / "fresh.py").read_text()
    named = re.findall(r'^    "(tests/[\w/.]+)",$', text, re.M)
    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []
