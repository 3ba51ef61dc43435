"""Mixed operations, all results checked, memory flat; here a short one."""

import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from stress import operations, programs, worker


@pytest.fixture
def arguments(monkeypatch):
    """Returns a function that sets the command line of a worker."""

    def set_to(**given):
        given = {"operations": 30, "programs": 15, "seed": 3} | given
        words = [f"--{name}={value}" for name, value in given.items()]
        monkeypatch.setattr(sys, "argv", ["worker", *words])

    return set_to


@pytest.fixture
def mesh():
    """As of two processes of four devices."""
    return jax.sharding.Mesh(
        np.array(jax.devices()).reshape(2, 4),
        programs.AXES,
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
    )


@pytest.mark.multiprocess
@pytest.mark.parametrize(("processes", "devices"), [(2, 1), (2, 2)])
def test_three_hundred_operations_between_processes_are_right(processes, devices):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "stress", "--operations=300"),
            *(f"--processes={processes}", f"--devices-per-process={devices}"),
            *("--programs=20", f"--seed={devices}"),
        ],
        env=os.environ
        | {"XLA_FLAGS": os.environ["QUICK_XLA_FLAGS"], "JAXCOMM_TIMEOUT": "60"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "through shared memory" in done.stdout
    (summary,) = [s for s in done.stdout.splitlines() if s.startswith("soak: ")]
    assert re.search(r"300 operations of 20 programs, .*: all right in \d+ s", summary)


def test_every_operation_is_in_the_pool_and_right(mesh):
    """Over both axes and over either, with operands of nothing and of a few bytes."""
    rng = np.random.default_rng(0)
    numbers = programs.numbers(rng)
    pool = programs.pool(mesh, 30, rng)
    names = {program.text.partition("(")[0] for program in pool}
    assert names == set(operations.operations(2, rng))
    axes = {program.text.partition("over axes ")[2] for program in pool}
    for some in (programs.AXES, ("process",), ("device",)):
        assert any(text.startswith(f"{some}, ") for text in axes)
    for program in pool:
        assert program.call(numbers, int(rng.integers(1 << 40))).difference() is None


def test_calls_of_a_program_get_other_numbers_each_time_and_on_each_rank(mesh):
    rng = np.random.default_rng(0)
    numbers = programs.numbers(rng)
    operation = operations.operations(8, rng)["pbarrier"]
    program = programs.Program(
        mesh, "pbarrier", operation, programs.AXES, "default", np.dtype(np.float32), 50
    )
    seen = [np.asarray(program.call(numbers, offset).result) for offset in (0, 1000)]
    rows = np.concatenate(seen)
    assert len(np.unique(rows.reshape(16, -1), axis=0)) == 16


def test_a_wrong_result_ends_it_with_status_1_and_is_described(
    arguments, monkeypatch, capsys
):
    real = operations.operations

    def with_one_wrong(size, rng):
        made = real(size, rng)
        wrong = operations.Operation(made["ring_shift"].call, lambda x: x + 1)
        return made | {"ring_shift": wrong}

    monkeypatch.setattr(operations, "operations", with_one_wrong)
    arguments(programs=24)
    assert worker.main() == 1
    said = capsys.readouterr()
    assert re.search(r"process 0: operation \d+ of seed 3, ring_shift\(", said.err)
    assert "elements are wrong, the first at [0, 0]: " in said.err
    assert "all right" not in said.out


def test_growing_memory_ends_it_with_status_1(arguments, monkeypatch, capsys):
    monkeypatch.setattr(worker.Memory, "growth", lambda self: 100_000_000)
    arguments()
    assert worker.main() == 1
    assert "memory grew by 100.0 MB" in capsys.readouterr().out


def test_growth_is_seen_in_the_steady_part_and_not_at_the_start():
    start, flat, rising = [0, 50, 80, 90], [100] * 12, list(range(100, 220, 10))
    assert worker.Memory(start + flat, [0] * 16).growth() == 0
    assert worker.Memory(start + rising, [0] * 16).growth() == 80
    # Pages of the shared memory that are touched late are none of it.
    assert worker.Memory(start + rising, [*start, *rising]).growth() == 0


@pytest.mark.parametrize("wrong", ["--processes=0", "--operations=x", "--nothing"])
def test_a_wrong_command_line_ends_with_status_2(wrong):
    done = subprocess.run(
        [sys.executable, "-m", "stress", wrong],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "usage: python -m stress" in done.stderr
