"""What a build leaves, and what is said where there was none."""

import importlib.resources
import pathlib
import shutil
import subprocess
import sys

import waiting

import jaxcomm

ROOT = pathlib.Path(__file__).parents[1]


def test_the_sources_alone_say_how_to_build(tmp_path):
    shutil.copytree(
        pathlib.Path(jaxcomm.__file__).parent,
        tmp_path / "jaxcomm",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    ran = subprocess.run(
        [sys.executable, "-c", "import jaxcomm"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=waiting.HANG_SECONDS,
    )
    assert ran.returncode == 1
    assert f"extension is not in {tmp_path / 'jaxcomm'}. In a clone" in ran.stderr
    assert "make develop" in ran.stderr


def test_the_committed_stub_is_the_generated_one():
    committed = ROOT / "jaxcomm" / "_ffi.pyi"
    generated = importlib.resources.files("jaxcomm") / "_ffi.pyi"
    assert committed.read_text() == generated.read_text(), "run `make stubs`"
