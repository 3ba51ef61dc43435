"""The PTX that is checked in is what the GPU code compiles to."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def load(root):
    path = root / "tools" / "make_ptx.py"
    spec = importlib.util.spec_from_file_location("make_ptx", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(root, *arguments):
    # In a process of its own: NVRTC sets the locale of the process.
    return subprocess.run(
        [sys.executable, root / "tools" / "make_ptx.py", *arguments],
        capture_output=True,
        text=True,
    )


@pytest.fixture
def make_ptx():
    return load(ROOT)


@pytest.fixture
def copy(make_ptx, tmp_path):
    """The tool with copies of the sources, which a test may change."""
    sources = (make_ptx.SOURCE, *make_ptx.HEADERS, make_ptx.OUTPUT)
    for name in (*sources, "tools/make_ptx.py", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    if make_ptx.INSTALLED.exists():
        (tmp_path / "build").mkdir()
        (tmp_path / "build" / "nvrtc").symlink_to(make_ptx.INSTALLED)
    return load(tmp_path)


@pytest.fixture
def needs_nvrtc(make_ptx):
    if make_ptx.library_path() is None:
        pytest.skip(f"no {make_ptx.REQUIREMENT}: `make ptx` installs it")


def change(tool, name, old, new):
    path = tool.ROOT / name
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_the_ptx_belongs_to_the_sources(make_ptx):
    text = (ROOT / make_ptx.OUTPUT).read_text(encoding="utf-8")
    assert f"// Sources: {make_ptx.digest()}\n" in text, "run `make ptx`"


def test_code_counts_and_comments_do_not(copy):
    before = copy.digest()
    change(copy, copy.SOURCE, "// Two numbers a word.", "//  Two  numbers.\n")
    assert copy.digest() == before
    change(copy, copy.SOURCE, "return 0x7fc0;", "return 0x7fc1;")
    assert copy.digest() != before
    before = copy.digest()
    change(copy, copy.HEADERS[0], "kMostRanks = 8", "kMostRanks = 7")
    assert copy.digest() != before


@pytest.mark.usefixtures("needs_nvrtc")
def test_nvrtc_makes_the_same_ptx():
    done = run(ROOT, "--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("needs_nvrtc")
def test_other_code_is_other_ptx(copy):
    change(copy, copy.SOURCE, "return 0x7fc0;", "return 0x7fc1;")
    done = run(copy.ROOT, "--check")
    assert done.returncode == 1
    assert "run `make ptx`" in done.stderr
    assert run(copy.ROOT).returncode == 0
    assert run(copy.ROOT, "--check").returncode == 0


@pytest.mark.usefixtures("needs_nvrtc")
def test_what_nvrtc_refuses_is_shown(copy):
    change(copy, copy.SOURCE, "return 0x7fc0;", "return unknown;")
    done = run(copy.ROOT)
    assert done.returncode != 0
    assert 'identifier "unknown" is undefined' in done.stderr


def test_it_says_what_is_missing(make_ptx, monkeypatch, capsys):
    monkeypatch.setattr(make_ptx, "library_path", lambda: None)
    assert make_ptx.main(["--check"]) == 2
    assert make_ptx.REQUIREMENT in capsys.readouterr().err


def test_the_drivers_and_gpus_that_we_promise_take_it():
    ptx = run(ROOT, "--ptx").stdout
    # ISA 8.0 is what the driver of CUDA 12.0 takes at most.
    assert re.search(r"^\.version 8\.0$", ptx, re.MULTILINE)
    assert re.search(r"^\.target sm_70$", ptx, re.MULTILINE)
    kernels = re.findall(r"^\.visible \.entry (\w+)\(", ptx, re.MULTILINE)
    sums = ["int32", "float32", "float16", "bfloat16"]
    assert sorted(kernels) == sorted(
        ["jaxcomm_stop", "jaxcomm_poison", *(f"jaxcomm_sum_{each}" for each in sums)]
    )
    # Lines stay in registers, and arguments where they are.
    assert ".local" not in ptx
    assert ".func" not in ptx
