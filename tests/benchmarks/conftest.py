"""Effort so small that a case takes milliseconds, and the command as a user runs it."""

import io
import os
import sys

import forked
import pytest
from rich.console import Console

from bench import cases, roofline, table
from bench.rows import FailedRow, MemoryRow, TimedRow
from bench.targets import Target
from bench.timing import Spread


@pytest.fixture(scope="session")
def session():
    effort = cases.Effort(rounds=2, fewest_rounds=1, budget=60.0, sample_seconds=0.0)
    return cases.Session(effort, roofline.measure(1 << 16, 32, 2))


@pytest.fixture
def command():
    """Returns a function that runs ``python -m bench`` to its end."""

    def run(*arguments):
        return forked.run(
            [sys.executable, "-m", "bench", *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            env=os.environ | {"XLA_FLAGS": os.environ["QUICK_XLA_FLAGS"]},
        )

    return run


@pytest.fixture
def printed():
    """Returns ``printed(rows, width)``: the lines of their tables."""

    def draw(rows, width=200):
        console = Console(file=io.StringIO(), width=width)
        for renderable in table.tables(rows, width):
            console.print(renderable)
        return console.file.getvalue().splitlines()

    return draw


@pytest.fixture
def the_line_with():
    """Returns ``find(lines, *words)``: the only one with all, its blanks as one."""

    def find(lines, *words):
        (line,) = (line for line in lines if all(word in line for word in words))
        return " ".join(line.split())

    return find


@pytest.fixture
def timed_row():
    """Returns ``row(suite, name, seconds, ...)``, whose numbers are not measured."""

    def row(suite, name, seconds, target=None, payload_bytes=256):
        first = next(iter(seconds.values()))
        return TimedRow(
            suite=suite, name=name, devices=8, target=target, dtype="float32",
            payload_bytes=payload_bytes,
            seconds={key: Spread(x / 2, x, 2 * x) for key, x in seconds.items()},
            ratios={key: x / first for key, x in seconds.items() if key != "jaxcomm"},
            unit="bytes", work=1e6, rates={key: 1e6 / x for key, x in seconds.items()},
            roofline="memcpy, 2 threads", roofline_rate=1e10,
            shares={key: 1e-4 / x for key, x in seconds.items()}, calls=1, rounds=3,
        )  # fmt: skip

    return row


@pytest.fixture
def rows(timed_row):
    """One row of each kind that there is, for each suite."""
    both = {"jaxcomm": 1e-4, "jax.lax": 2e-4}
    of = "jaxcomm", "ring over lax.ppermute"
    ways, held, grown = (
        dict(zip(of, pair, strict=True))
        for pair in ((0.5, 0.6), (1 << 20, 2 << 20), (0.01, 0.1))
    )
    memory = {"suite": "memory", "name": "ring", "temp_bytes": held}
    return [
        timed_row("collectives", "dispatch floor", {"x + 1": 1e-5}),
        timed_row("collectives", "psum", both, Target("ratio", 1.1)),
        timed_row("collectives", "psum", both, Target("ratio", 3.0), 65536),
        FailedRow(suite="collectives", name="pmax", devices=8, error="ValueError: no"),
        timed_row("chain", "50 psums", both),
        timed_row("attention", "forward", ways, Target("share", 0.5), None),
        MemoryRow(devices=2, growth={}, **memory),
        MemoryRow(devices=8, growth=grown, target=Target("growth", 0.05), **memory),
    ]
