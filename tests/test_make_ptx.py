"""The PTX that is checked in is what the GPU code compiles to."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def make_ptx():
    path = ROOT / "tools" / "make_ptx.py"
    spec = importlib.util.spec_from_file_location("make_ptx", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(make_ptx, monkeypatch, tmp_path):
    """The tool, on a copy of the sources that a test may change."""
    for name in (make_ptx.SOURCE, *make_ptx.HEADERS, make_ptx.OUTPUT):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.setattr(make_ptx, "ROOT", tmp_path)
    return make_ptx


def change(tool, name, old, new):
    path = tool.ROOT / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_the_ptx_belongs_to_the_sources(make_ptx):
    text = (ROOT / make_ptx.OUTPUT).read_text()
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


def test_nvrtc_makes_the_same_ptx(make_ptx):
    if make_ptx.library_path() is None:
        pytest.skip(f"no {make_ptx.REQUIREMENT}: `make ptx` installs it")
    assert make_ptx.main(["--check"]) == 0


def test_other_code_is_other_ptx(copy, capsys):
    if copy.library_path() is None:
        pytest.skip(f"no {copy.REQUIREMENT}: `make ptx` installs it")
    change(copy, copy.SOURCE, "return 0x7fc0;", "return 0x7fc1;")
    assert copy.main(["--check"]) == 1
    assert "run `make ptx`" in capsys.readouterr().err
    assert copy.main([]) == 0
    assert copy.main(["--check"]) == 0


def test_it_says_what_is_missing(make_ptx, monkeypatch, capsys):
    monkeypatch.setattr(make_ptx, "library_path", lambda: None)
    assert make_ptx.main(["--check"]) == 2
    assert make_ptx.REQUIREMENT in capsys.readouterr().err


def test_the_drivers_and_gpus_that_we_promise_take_it(make_ptx, capsys):
    assert make_ptx.main(["--ptx"]) == 0
    ptx = capsys.readouterr().out
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
