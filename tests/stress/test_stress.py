"""Mixed operations, all results checked, memory flat; here a short one."""

import dataclasses
import os
import re
import sys

import forked
import pytest
import waiting

from stress import worker


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "number", "calls"),
    [(1, 5, 16), pytest.param(2, 30, 300, marks=pytest.mark.thorough)],
)
def test_operations_between_processes_are_right(devices, number, calls):
    done = forked.run(
        [
            *(sys.executable, *forked.LAUNCH, "-n2", "--no-prefix"),
            *(f"--devices-per-process={devices}", "-m", "stress.worker"),
            *(f"--operations={calls}", f"--programs={number}", f"--seed={devices}"),
        ],
        env=os.environ
        | {
            "XLA_FLAGS": os.environ["QUICK_XLA_FLAGS"],
            "JAXCOMM_TIMEOUT": str(waiting.HANG_SECONDS),
        },
        capture_output=True,
        text=True,
        timeout=2 * waiting.HANG_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "through shared memory" in done.stdout
    (summary,) = [s for s in done.stdout.splitlines() if s.startswith("soak: ")]
    said = rf"{calls} operations of {number} programs, .*: all right"
    assert re.search(said, summary)


def test_a_wrong_result_ends_it_with_status_1_and_is_described(monkeypatch, capsys):
    case = worker.CASES["ring_shift"]
    wrong = dataclasses.replace(case, model=lambda choice: lambda x: x + 1)
    monkeypatch.setattr(worker, "CASES", {"ring_shift": wrong})
    assert worker.main(4, 1, 3) == 1
    said = capsys.readouterr()
    assert re.search(r"process 0: operation 0 of seed 3, ring_shift\(", said.err)
    assert "all right" not in said.out
