"""The parts of a release agree."""

import importlib.metadata
import re
import subprocess
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


@pytest.fixture
def release(monkeypatch, tmp_path):
    """``make release-check``, its records and logs in a folder of the test."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    main = importlib.import_module("release.__main__")
    monkeypatch.setattr(main.env, "WORK", tmp_path)
    monkeypatch.setattr(main.env, "interpreters", dict)
    monkeypatch.setattr(main.kept, "FOLDER", tmp_path / "passed")
    return main


def check_of(release, program, **more):
    return release.Check("a check", [sys.executable, "-c", program], **more)


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("print('fine')", "passed"),
        ("print('Python 3.9: NOT RUN, none here')", "Python 3.9: NOT RUN, none here"),
        ("raise SystemExit(3)", "FAILED: status 3"),
    ],
)
def test_a_check_that_ran_in_part_has_not_passed_and_runs_again(
    program, verdict, release, monkeypatch
):
    monkeypatch.setattr(release.kept, "tree", lambda: "tree")
    check = check_of(release, program)
    assert release.once("it", check, "tree", "run 1")[0].startswith(verdict)
    again = "passed in run 1" if verdict == "passed" else verdict
    assert release.once("it", check, "tree", "run 2")[0].startswith(again)


@pytest.mark.parametrize(
    "change", ["tree", "command", "made", "used", "record", "afresh"]
)
def test_what_passed_runs_again_where_anything_is_another(change, release, monkeypatch):
    monkeypatch.setattr(release.env, "ROOT", release.env.WORK)
    for name in ("made", "used"):
        (release.env.WORK / f"{name}.whl").write_text("1")
    trees = iter(["tree"] * 3 + ["another"] * 9)
    monkeypatch.setattr(release.kept, "tree", lambda: next(trees))
    monkeypatch.setattr(release.kept, "commit", lambda: "a commit")
    monkeypatch.setattr(sys, "argv", ["release", "--only", "it"])

    def verdict(program="0"):
        check = check_of(release, program, makes="made.*", uses="used.*")
        monkeypatch.setattr(release, "CHECKS", {"it": check})
        seen = []
        monkeypatch.setattr(release, "table", lambda ended: seen.append(ended) or "")
        release.main()
        return seen[0]["it"][0]

    assert verdict() == "passed"
    assert verdict().startswith("passed in the run of ")
    if change in ("made", "used"):
        (release.env.WORK / f"{change}.whl").write_text("2")
    if change == "record":
        (release.kept.FOLDER / "it.json").write_text("{")
    if change == "afresh":
        sys.argv.append("--afresh")
    if change != "tree":
        trees = iter(["tree"] * 9)
    assert verdict("1" if change == "command" else "0") == "passed"


def test_a_check_counts_for_nothing_if_files_change_meanwhile(release, monkeypatch):
    monkeypatch.setattr(release.kept, "tree", lambda: "after")
    verdict, _ = release.once("it", check_of(release, "0"), "before", "run 1")
    assert verdict.startswith("FAILED: files of the tree changed while it ran")
    assert not list(release.kept.FOLDER.glob("*"))


def test_every_file_that_git_does_not_ignore_is_of_the_tree(release, monkeypatch):
    root = release.env.WORK
    monkeypatch.setattr(release.env, "ROOT", root)
    subprocess.run(["git", "init", "--quiet", root], check=True)
    (root / ".gitignore").write_text("build\n")
    seen = []
    for name, text in ("new", "1"), ("new", "2"), ("build", "1"):
        (root / name).write_text(text)
        seen.append(release.kept.tree())
    assert seen[0] != seen[1] == seen[2]


def test_what_is_run_on_an_installed_wheel_is_there():
    """pytest says "no tests ran" of all if one of its paths is missing."""
    text = (ROOT / "tools" / "release" / "fresh.py").read_text()
    named = re.findall(r'^    "(tests/[\w/.]+)",$', text, re.M)
    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []
