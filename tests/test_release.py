"""The parts of a release agree, and `make release-check` says what failed."""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_written_in_one_place():
    sections = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert sections[0] == "Unreleased"
    assert re.fullmatch(
        rf"{re.escape(PROJECT['version'])}, (\d{{4}}-\d\d-\d\d|not released yet)",
        sections[1],
    )
    for name in ("MODULE.bazel", "CITATION.cff", "CMakeLists.txt", "docs/conf.py"):
        assert PROJECT["version"] not in (ROOT / name).read_text(), name


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
        ({"good": python("")}, 0, "passed"),
        ({"bad": python("import sys; sys.exit('a reason')")}, 1, "FAILED: status 1"),
        ({"absent": python("", needs="no-such-program")}, 1, "NOT RUN: no no-such-"),
        ({"absent": python("", python="3.99")}, 1, "NOT RUN: no Python 3.99"),
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


def test_an_unknown_check_is_refused(release, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["release", "--only", "lint,tests"])
    with pytest.raises(SystemExit):
        release.main()
    assert "no check ['tests']" in capsys.readouterr().err


@pytest.fixture
def tool(monkeypatch):
    """Gives ``tool(name)``: a module of tools/release that needs its packages."""
    pytest.importorskip("ziglang", reason="needs jaxcomm[release]")
    monkeypatch.syspath_prepend(ROOT / "tools")
    return lambda name: importlib.import_module(f"release.{name}")


@pytest.mark.parametrize(
    ("tag", "versions"),
    [
        ("cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64", {"3.11"}),
        ("cp312-abi3-manylinux_2_28_x86_64", {"3.12", "3.13", "3.14"}),
        ("cp313-cp313-manylinux_2_28_x86_64", {"3.13"}),
        ("cp312-abi3-manylinux_2_35_x86_64", set()),
    ],
)
def test_a_wheel_s_tags_say_which_versions_of_python_take_it(tool, tag, versions):
    wheel = f"jaxcomm-0.1.0-{tag}.whl"
    supported = tool("environments").supported()
    assert supported[-1] == "3.14"
    taken = {v for v in supported if tool("wheels").is_for(wheel, v)}
    assert taken == versions


def test_a_header_of_an_unknown_component_is_refused(tool):
    licences = tool("licences")
    site = "/venv/lib/python3.11/site-packages"
    assert licences.component(f"{site}/nanobind/include/nanobind/nanobind.h") == (
        "nanobind"
    )
    assert licences.component(
        f"{site}/nanobind/ext/robin_map/include/tsl/robin_map.h"
    ) == ("robin_map")
    assert licences.component(str(ROOT / "ffi" / "core" / "plan.h")) is None
    with pytest.raises(SystemExit, match="mpi\\.h: whose is it"):
        licences.component("/usr/include/mpi.h")
