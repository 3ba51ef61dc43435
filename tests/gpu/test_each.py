"""Tests of this folder in several processes, as `make gpu-test ARGS=--each` has them.

Over the stand-in, so that no change breaks that unseen.
"""

import pathlib
import sys

import forked
import pytest
import waiting

pytestmark = [pytest.mark.thorough, pytest.mark.multiprocess]

HERE = pathlib.Path(__file__).parent
# All that need not compile for long.
FILES = "context", "copies", "one_shot", "ragged"


def test_processes_run_them_in_step(stand_in_path):
    words = ["-n", "3", "--devices-per-process", "1", "--platform", "cpu"]
    files = [HERE / f"test_{name}.py" for name in FILES]
    job = forked.run(
        [sys.executable, "-P", "-m", "jaxcomm.launch", *words, "-m", "pytest",
         "-x", "-q", "-p", "no:cacheprovider", *files],
        capture_output=True,
        text=True,
        timeout=waiting.HANG_SECONDS,
        check=False,
    )  # fmt: skip
    assert job.returncode == 0, job.stdout[-3000:] + job.stderr[-3000:]
    assert job.stdout.count(" passed in ") == 3
