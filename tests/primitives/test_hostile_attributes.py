"""Attributes of custom calls that no lowering of ours writes, as an export may have."""

import json
import os
import pathlib
import sys

import forked
import pytest
from waiting import HANG_SECONDS

PROGRAM = pathlib.Path(__file__).parents[1] / "support" / "hostile_attributes.py"
CALLS = 40


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("backend", ["host", "nccl"])
def test_no_attribute_crashes_hangs_or_harms_others(request, backend):
    variables = {"JAXCOMM_TIMEOUT": f"{HANG_SECONDS:g}"}
    if backend == "nccl":
        variables |= {
            "JAXCOMM_NCCL_LIBRARY": request.getfixturevalue("stand_in_path"),
            "JAXCOMM_BACKEND": "nccl",
            "JAXCOMM_FAKE_KERNELS": "1",
        }
    done = forked.run(
        [sys.executable, PROGRAM, str(len(backend)), str(CALLS)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    # Both happen: names may be anything, and numbers may not.
    assert sum(outcomes.values()) == CALLS
    assert min(outcomes.values()) > CALLS // 6, outcomes
