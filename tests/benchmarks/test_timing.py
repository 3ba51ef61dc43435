import gc

import pytest
import waiting

from bench import timing
from bench.timing import Quartiles, Spread


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


@pytest.fixture
def clock():
    return Clock()


def interleave(clock, variants, calls=1, **options):
    return timing.interleave(
        variants, calls=dict.fromkeys(variants, calls), clock=clock.monotonic, **options
    )


def test_the_order_alternates_between_rounds(clock):
    variants = {name: clock.variant(name, 1.0) for name in "ABC"}
    interleave(clock, variants, rounds=3)
    assert "".join(clock.order) == "ABCCBAABC"


def test_one_may_stay_last_while_the_others_take_turns(clock):
    variants = {name: clock.variant(name, 1.0) for name in "ABR"}
    interleave(clock, variants, rounds=3, last="R")
    assert "".join(clock.order) == "ABRBARABR"


def test_a_sample_is_the_mean_of_its_calls_of_which_each_has_its_number(clock):
    variants = {"A": clock.variant("A", 1, 2, 3, 6), "R": clock.variant("R", 1.0)}
    calls = {"A": 2, "R": 1}
    samples = timing.interleave(variants, calls=calls, rounds=2, clock=clock.monotonic)
    assert samples == {"A": [1.5, 4.5], "R": [1.0, 1.0]}
    assert "".join(clock.order) == "AARRAA"


def test_a_spent_budget_ends_it_between_rounds(clock):
    variants = {name: clock.variant(name, 2.0) for name in "AB"}
    samples = interleave(clock, variants, rounds=99, budget=7.0)
    assert {name: len(of) for name, of in samples.items()} == {"A": 2, "B": 2}


def test_the_fewest_rounds_are_done_whatever_they_take(clock):
    samples = interleave(
        clock, {"A": clock.variant("A", 50.0)}, rounds=9, budget=1.0, fewest_rounds=4
    )
    assert len(samples["A"]) == 4


def test_nothing_is_collected_meanwhile_and_the_collector_comes_back():
    seen = []

    def interrupt():
        seen.append(gc.isenabled())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        timing.interleave({"A": interrupt}, calls={"A": 1}, rounds=1)
    assert seen == [False]
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("seconds", "calls"),
    [
        # The fastest fills a sample of 2 ms.
        ({"A": [3e-4], "B": [5e-3]}, 7),
        # One slow first call does not shorten it; one that is always slow is one.
        ({"A": [8.0, 1.1e-3]}, 2),
        ({"A": [9.0]}, 1),
        # The clock is too coarse to see a call: the most calls.
        ({"A": [0.0]}, 1000),
    ],
)
def test_calls_fill_a_sample(seconds, calls, clock):
    variants = {name: clock.variant(name, *of) for name, of in seconds.items()}
    found = timing.calls_per_sample(variants, seconds=2e-3, clock=clock.monotonic)
    assert found == calls


def test_spreads_tell_the_extremes_the_middle_and_the_middle_half():
    for samples, median in (([5.0], 5.0), ([3.0, 1.0, 9.0], 3.0), ([1.0, 2.0], 1.5)):
        assert Spread.of(samples) == Spread(min(samples), median, max(samples))
    assert Quartiles.of([5.0]) == Quartiles(5.0, 5.0, 5.0, 5.0, 5.0)
    found = Quartiles.of([4.0, 0.0, 1.0, 3.0, 2.0])
    assert found == Quartiles(0.0, 2.0, 4.0, 1.0, 3.0)


def test_the_ratio_is_taken_round_by_round():
    # A machine that turns ten times slower in the last rounds changes no ratio. The
    # ratio of the medians would be 20 / 2.
    ours, theirs = [1.0, 2.0, 10.0, 10.0, 1.0], [2.0, 4.0, 20.0, 20.0, 20.0]
    assert timing.median_ratio(theirs, ours) == 2.0
