"""The parts of a release agree."""

import importlib.metadata
import re
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
