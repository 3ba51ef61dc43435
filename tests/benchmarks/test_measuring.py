"""What a row says: the times of equal results, taken in turns."""

import contextlib
import io
import multiprocessing

import numpy as np
import pytest
import waiting
from rich.console import Console

from bench import cases, options, run, timing
from bench.own_process import Processes


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        ([1.0, 2.0], [1.0, 2.001], None),
        ([1.0, 2.0], [1.0, 2.1], "differ by"),
        ([[1.0], [2.0]], [[1.0, 2.0]], "shape"),
        # Wherever it is, and whosever.
        ([1.0, np.nan], [1.0, 2.0], "differ by nan"),
        ([1.0, 2.0], [-np.inf, 2.0], "differ by nan"),
    ],
)
def test_results_that_differ_are_refused(ours, theirs, text):
    results = {"a": np.array(ours), "b": np.array(theirs)}
    refused = (
        pytest.raises(ValueError, match=text) if text else contextlib.nullcontext()
    )
    with refused:
        cases.check_agreement(results, 1e-3)


class Clock(waiting.Clock):
    """Time that passes only inside the calls, and the order of these."""

    def __init__(self):
        super().__init__(0.0)
        self.order = []

    def variant(self, name, *seconds):
        """A call that takes each of the times in turn, the last for ever."""
        remaining = list(seconds)

        def call():
            self.order.append(name)
            self.advance(remaining.pop(0) if len(remaining) > 1 else remaining[0])

        return call


def test_a_sample_is_the_mean_of_its_calls_and_a_ratio_is_taken_round_by_round():
    clock = Clock()
    variants = {"A": clock.variant("A", 1, 2, 3, 6), "R": clock.variant("R", 1.0)}
    calls = {"A": 2, "R": 1}
    samples = timing.interleave(variants, calls=calls, rounds=2, clock=clock.monotonic)
    assert samples == {"A": [1.5, 4.5], "R": [1.0, 1.0]}
    # A machine that turns ten times slower in the last rounds changes no ratio. That of
    # the medians would be 20 / 2.
    ours, theirs = [1.0, 2.0, 10.0, 10.0, 1.0], [2.0, 4.0, 20.0, 20.0, 20.0]
    assert timing.median_ratio(theirs, ours) == 2.0


class Raising(cases.Case):
    def measure(self, session):
        raise MemoryError("two\nlines")


def test_what_fails_costs_one_row(session):
    rows = []
    raising = Raising(suite="s", name="n", devices=2)
    run.run([raising], session, rows, Console(file=io.StringIO()))
    assert [row.error for row in rows] == ["MemoryError: two lines"]
    asked = options.read(("all", "--quick", "--repeats", "2", "--devices", "2"))
    with Processes(asked) as processes:
        # The dispatch floor, of which little is compiled.
        case = next(case for case in processes.cases() if "floor" in case.name)
        (row,) = run.measure(case, session)
        assert (row.kind, row.suite, row.devices) == ("timed", "collectives", 2)
        (child,) = multiprocessing.active_children()
        child.kill()
        child.join()
        (row,) = run.measure(case, session)
        assert "the process with 2 devices ended with status -9" in row.error
    assert multiprocessing.active_children() == []
