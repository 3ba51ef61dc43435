"""The PTX that is checked in serves the GPUs that we promise; its tool sees changes.

That it is what the GPU code compiles to: `make lint`.
"""

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
def copy(tmp_path):
    """The tool with copies of the sources, which a test may change."""
    tool = load(ROOT)
    sources = (tool.SOURCE, *tool.HEADERS, tool.OUTPUT)
    for name in (*sources, "tools/make_ptx.py", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    if tool.INSTALLED.exists():
        (tmp_path / "build").mkdir()
        (tmp_path / "build" / "nvrtc").symlink_to(tool.INSTALLED)
    return load(tmp_path)


def change(tool, name, old, new):
    path = tool.ROOT / name
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_code_counts_and_comments_do_not(copy):
    before = copy.digest()
    change(copy, copy.SOURCE, "// Two numbers a word.", "//  Two  numbers.\n")
    assert copy.digest() == before
    change(copy, copy.HEADERS[0], "kMostRanks = 8", "kMostRanks = 7")
    assert copy.digest() != before


def test_other_code_is_other_ptx_and_what_nvrtc_refuses_is_shown(copy):
    if copy.library_path() is None:
        pytest.skip(f"no {copy.REQUIREMENT}: `make ptx` installs it")
    change(copy, copy.SOURCE, "return 0x7fc0;", "return 0x7fc1;")
    done = run(copy.ROOT, "--check")
    assert done.returncode == 1
    assert "run `make ptx`" in done.stderr
    assert run(copy.ROOT).returncode == 0
    assert run(copy.ROOT, "--check").returncode == 0
    change(copy, copy.SOURCE, "return 0x7fc1;", "return unknown;")
    done = run(copy.ROOT)
    assert done.returncode != 0
    assert 'identifier "unknown" is undefined' in done.stderr


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
