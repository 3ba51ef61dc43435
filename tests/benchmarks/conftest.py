"""Effort so small that a case takes milliseconds, and the command as a user runs it."""

import os
import sys

import forked
import pytest

from bench import cases, roofline


@pytest.fixture(scope="session")
def session():
    effort = cases.Effort(rounds=2, fewest_rounds=1, budget=60.0, sample_seconds=0.0)
    return cases.Session(effort, roofline.measure(1 << 16, 32, 2))


@pytest.fixture
def command():
    def run(*arguments):
        return forked.run(
            [sys.executable, "-m", "bench", *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            env=os.environ | {"XLA_FLAGS": os.environ["QUICK_XLA_FLAGS"]},
        )

    return run
