"""``BUILD`` names the files that exist, and those that its targets include."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# `make planbench` runs it, by CMake.
BENCHMARK = "tests/ffi/plan_bench.cc"


def _glob(include, exclude=(), allow_empty=False):
    def found(patterns):
        return {
            path.relative_to(ROOT).as_posix()
            for pattern in patterns
            for path in ROOT.glob(pattern)
            if path.is_file()
        }

    files = sorted(found(include) - found(exclude))
    assert files or allow_empty, f"no file matches {include}"
    return files


def _read_build():
    """Return the attributes of each target by name; the file is valid Python."""
    targets = {}

    def rule(**attributes):
        targets[attributes["name"]] = attributes

    names = {
        "load": lambda *_: None,
        "package": lambda **_: None,
        "glob": _glob,
        **dict.fromkeys(("cc_library", "cc_binary", "cc_test", "py_library"), rule),
    }
    exec(compile((ROOT / "BUILD").read_text("utf-8"), "BUILD", "exec"), names)
    return targets


TARGETS = _read_build()
C_TARGETS = {name: of for name, of in TARGETS.items() if name != "jaxcomm"}


def _own(target):
    return [
        file
        for attribute in ("srcs", "hdrs", "textual_hdrs")
        for file in target.get(attribute, ())
    ]


def _visible(target):
    """Return the files of a target and of the targets that it depends on."""
    files = set(_own(target))
    for dependency in target.get("deps", ()):
        if dependency.startswith(":"):
            files |= _visible(TARGETS[dependency[1:]])
    return files


def _includes(file):
    text = (ROOT / file).read_text("utf-8")
    return re.findall(r'(?m)^\s*#\s*include\s*"((?:ffi|tests)/[^"]+)"', text)


@pytest.mark.parametrize("name", C_TARGETS)
def test_a_target_has_what_its_files_include(name):
    own = _own(C_TARGETS[name])
    assert [file for file in own if not (ROOT / file).is_file()] == []
    visible = _visible(C_TARGETS[name])
    needed = {(file, header) for file in own for header in _includes(file)}
    assert {pair for pair in needed if pair[1] not in visible} == set()


def test_every_source_is_compiled_once():
    compiled = [
        file
        for target in C_TARGETS.values()
        for file in target["srcs"]
        if file.endswith(".cc")
    ]
    sources = _glob(["ffi/**/*.cc", "tests/ffi/*.cc", "tests/doubles/**/*.cc"])
    assert sorted(compiled) == [file for file in sources if file != BENCHMARK]
