"""Mixed operations, all results checked, memory flat; here a short one."""

import dataclasses
import os
import re
import sys

import forked
import jax
import numpy as np
import pytest
import waiting

from stress import programs, worker


@pytest.fixture
def mesh():
    """As of two processes of four devices."""
    return jax.sharding.Mesh(
        np.array(jax.devices()).reshape(2, 4),
        programs.AXES,
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
    )


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "number", "calls"),
    [(1, 5, 16), pytest.param(2, 30, 300, marks=pytest.mark.thorough)],
)
def test_operations_between_processes_are_right(devices, number, calls):
    done = forked.run(
        [
            *(sys.executable, "-m", "jaxcomm.launch", "-n2", "--no-prefix"),
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
    assert re.search(
        rf"{calls} operations of {number} programs, .*: all right", summary
    )


@pytest.mark.parametrize(
    "called", [False, pytest.param(True, marks=pytest.mark.thorough)]
)
def test_every_operation_is_in_the_pool_and_right(mesh, called):
    """Over both axes and over either, with operands of nothing and of a few bytes."""
    rng = np.random.default_rng(0)
    pool = [programs.Program(mesh, number, rng) for number in range(30)]
    assert {each.text.partition("(")[0] for each in pool} == set(programs.CASES)
    texts = " ".join(each.text for each in pool)
    for some in (programs.AXES, ("process",), ("device",)):
        assert f" over axes {some}, " in texts
    numbers = programs.numbers(rng)
    for program in pool if called else pool[:2]:
        assert program.call(numbers, int(rng.integers(1 << 40))).difference() is None


def test_a_wrong_result_ends_it_with_status_1_and_is_described(monkeypatch, capsys):
    case = programs.CASES["ring_shift"]
    wrong = dataclasses.replace(case, model=lambda choice: lambda x: x + 1)
    monkeypatch.setattr(programs, "CASES", {"ring_shift": wrong})
    assert worker.main(4, 1, 3) == 1
    said = capsys.readouterr()
    assert re.search(r"process 0: operation 0 of seed 3, ring_shift\(", said.err)
    assert "elements are wrong, the first at [0, 0]: " in said.err
    assert "all right" not in said.out


def test_growth_is_seen_in_the_steady_part_and_not_at_the_start():
    start, flat, rising = [0, 50, 80, 90], [100] * 12, list(range(100, 220, 10))
    assert worker.Memory(start + flat, [0] * 16).growth() == 0
    assert worker.Memory(start + rising, [0] * 16).growth() == 80
    # Pages of the shared memory that are touched late are none of it.
    assert worker.Memory(start + rising, [*start, *rising]).growth() == 0
