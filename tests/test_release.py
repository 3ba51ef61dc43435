"""The parts of a release agree, and `make release-check` says what failed."""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_changelog_names_the_version_that_is_built():
    sections = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert sections[0] == "Unreleased"
    assert re.fullmatch(
        rf"{re.escape(PROJECT['version'])}, (\d{{4}}-\d\d-\d\d|not released yet)",
        sections[1],
    )


@pytest.fixture
def installed():
    try:
        return importlib.metadata.distribution("jaxcomm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("jaxcomm is not installed: make install")


def test_the_package_carries_every_licence(installed):
    found = {
        Path(file).name: file.read_text()
        for file in installed.files
        if ".dist-info/licenses/" in str(file)
    }
    expected = [ROOT / "LICENSE", ROOT / "NOTICE", *(ROOT / "licenses").glob("*.txt")]
    assert len(expected) == 7
    assert found == {path.name: path.read_text() for path in expected}


def test_a_package_index_shows_no_link_that_leads_nowhere(installed):
    description = installed.metadata.get_payload()
    assert "# jaxcomm" in description
    assert re.findall(r"\]\((?!https?:)[^)]*\)", description) == []


@pytest.fixture
def release(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "tools")
    runner = importlib.import_module("release.__main__")
    monkeypatch.setattr(runner.env, "WORK", tmp_path)
    return runner


def python(code, **needs):
    return lambda runner: runner.Check("a check", [sys.executable, "-c", code], **needs)


@pytest.mark.parametrize(
    ("checks", "status", "verdict"),
    [
        ({"bad": python("import sys; sys.exit('a reason')")}, 1, "FAILED: status 1"),
        ({"absent": python("", needs="no-such-program")}, 1, "NOT RUN: no no-such-"),
        ({}, 0, "passed"),
    ],
)
def test_each_check_has_its_verdict(
    release, monkeypatch, capfd, checks, status, verdict
):
    made = {name: check(release) for name, check in checks.items()}
    monkeypatch.setattr(release, "CHECKS", {**made, "good too": python("")(release)})
    monkeypatch.setattr(sys, "argv", ["release"])
    assert release.main() == status
    printed = capfd.readouterr().out
    assert verdict in printed
    assert re.search(r"^good too .* passed", printed, re.M)
    assert ("a reason" in printed) == ("bad" in checks)
