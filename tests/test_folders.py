"""Each folder of ``ffi/`` includes only folders below it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# From below. Folders on one line do not include each other.
ORDER = [
    ["base"],
    ["os"],
    ["flight"],
    ["core"],
    ["planners"],
    ["xla", "backends/host", "backends/nccl"],
    ["python"],
]
LEVELS = {folder: level for level, folders in enumerate(ORDER) for folder in folders}

# Edges that are still to be removed: (file, header). Add none.
KNOWN = set()


def _sources():
    return sorted(
        path
        for path in (ROOT / "ffi").rglob("*")
        if path.suffix in {".cc", ".h", ".inc", ".cu"}
    )


def _name(path):
    return path.relative_to(ROOT).as_posix()


def _includes(path):
    return re.findall(
        r'^\s*#\s*include\s*["<]([^">]+)[">]', path.read_text("utf-8"), re.MULTILINE
    )


def _folder(name):
    """Return the folder of ``ORDER`` that a file lies in, or None."""
    inner = name.removeprefix("ffi/")
    return next((f for f in LEVELS if inner.startswith(f + "/")), None)


def test_every_file_lies_in_a_folder_of_the_table():
    files = [_name(path) for path in _sources()]
    assert len(files) > 100
    assert [name for name in files if _folder(name) is None] == []


def _edges_upwards():
    for path in _sources():
        name = _name(path)
        own = _folder(name)
        for header in _includes(path):
            if not header.startswith("ffi/"):
                continue
            assert (ROOT / header).is_file(), f"{name} includes {header}: no such file"
            other = _folder(header)
            if own != other and LEVELS[own] <= LEVELS[other]:
                yield name, header


def test_a_folder_includes_only_folders_below_it():
    assert set(_edges_upwards()) == KNOWN


def test_the_library_includes_no_test():
    found = [(_name(p), h) for p in _sources() for h in _includes(p) if "tests/" in h]
    assert found == []


def test_only_the_python_folder_sees_python():
    seen = {
        _folder(_name(path))
        for path in _sources()
        if re.search(r"nanobind|\bPy[A-Z_]\w+|Python\.h", path.read_text("utf-8"))
    }
    assert seen == {"python"}


def test_only_the_hook_header_names_the_stand_in():
    named = {
        _name(path)
        for path in _sources()
        if re.search(r"(?i)stand-?in\b|fake|jaxcommTestDouble", path.read_text("utf-8"))
    }
    assert named == {"ffi/backends/nccl/test_double.h"}


def test_include_guards_name_the_file():
    for path in _sources():
        for guard in re.findall(
            r"(?m)^#ifndef (JAXCOMM_\w+_H_)$", path.read_text("utf-8")
        ):
            assert guard == f"JAXCOMM_{re.sub('[/.]', '_', _name(path)).upper()}_"
