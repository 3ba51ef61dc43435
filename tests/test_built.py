"""A clone in which nothing was built says so."""

import pathlib
import shutil
import subprocess
import sys

import jaxcomm


def test_the_sources_alone_say_what_to_do(tmp_path):
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
        timeout=60,
        check=False,
    )
    assert ran.returncode == 1
    assert f"extension is not in {tmp_path / 'jaxcomm'}. In a clone" in ran.stderr
    assert "make develop" in ran.stderr
