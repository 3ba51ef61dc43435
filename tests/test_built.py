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


def test_processes_that_tests_start_import_the_package_under_test(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", "import jaxcomm; print(jaxcomm.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stdout.strip() == jaxcomm.__file__
