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
    words = [sys.executable, root / "tools" / "make_ptx.py", *arguments]
    return subprocess.run(words, capture_output=True, text=True)


def test_other_code_is_other_ptx_and_what_nvrtc_refuses_is_shown(tmp_path):
    tool = load(ROOT)
    for name in (
        *(tool.SOURCE, *tool.HEADERS, tool.OUTPUT),
        *("tools/make_ptx.py", "pyproject.toml"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    if tool.INSTALLED.exists():
        (tmp_path / "build").mkdir()
        (tmp_path / "build" / "nvrtc").symlink_to(tool.INSTALLED)
    copy = load(tmp_path)

    def change(name, old, new):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert old in text
        (tmp_path / name).write_text(text.replace(old, new), encoding="utf-8")
        return copy.digest()

    # Comments do not count.
    before = copy.digest()
    assert change(copy.SOURCE, "// Two numbers a", "//  2 numbers a\n//") == before
    assert change(copy.HEADERS[0], "kMostRanks = 8", "kMostRanks = 7") != before
    assert change(copy.HEADERS[0], "kMostRanks = 7", "kMostRanks = 8") == before
    assert change(copy.SOURCE, "return 0x7fc0;", "return 0x7fc1;") != before
    if copy.library_path() is None:
        pytest.skip(f"no {copy.REQUIREMENT}: `make ptx` installs it")
    done = run(tmp_path, "--check")
    assert done.returncode == 1
    assert "run `make ptx`" in done.stderr
    assert run(tmp_path).returncode == 0
    assert run(tmp_path, "--check").returncode == 0
    change(copy.SOURCE, "return 0x7fc1;", "return unknown;")
    done = run(tmp_path)
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
