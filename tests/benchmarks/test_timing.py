import gc

import pytest

from bench import timing
from bench.timing import Quartiles, Spread


class Clock:
    """Time that passes only inside the calls, and the order of these."""

    def __init__(self):
        self.now = 0.0
        self.order = []

    def __call__(self):
        return self.now

    def variant(self, name, *seconds):
        """A call that takes each of the times in turn, the last for ever."""
        remaining = list(seconds)

        def call():
            self.order.append(name)
            self.now += remaining.pop(0) if len(remaining) > 1 else remaining[0]

        return call


@pytest.fixture
def clock():
    return Clock()


def interleave(clock, variants, calls=1, **options):
    return timing.interleave(
        variants, calls=dict.fromkeys(variants, calls), clock=clock, **options
    )


def test_the_order_alternates_between_rounds(clock):
    variants = {name: clock.variant(name, 1.0) for name in "ABC"}
    interleave(clock, variants, rounds=3)
    assert "".join(clock.order) == "ABCCBAABC"


def test_one_may_stay_last_while_the_others_take_turns(clock):
    variants = {name: clock.variant(name, 1.0) for name in "ABR"}
    interleave(clock, variants, rounds=3, last="R")
    assert "".join(clock.order) == "ABRBARABR"


def test_a_sample_is_the_mean_of_its_calls(clock):
    samples = interleave(clock, {"A": clock.variant("A", 1, 2, 3, 6)}, 2, rounds=2)
    assert samples == {"A": [1.5, 4.5]}


def test_variants_may_be_called_differently_often(clock):
    variants = {name: clock.variant(name, 1.0) for name in "AR"}
    timing.interleave(variants, calls={"A": 3, "R": 1}, rounds=1, clock=clock)
    assert "".join(clock.order) == "AAAR"


def test_a_spent_budget_ends_it_between_rounds(clock):
    variants = {name: clock.variant(name, 2.0) for name in "AB"}
    samples = interleave(clock, variants, rounds=99, budget=7.0)
    assert {name: len(of) for name, of in samples.items()} == {"A": 2, "B": 2}


def test_the_fewest_rounds_are_done_whatever_they_take(clock):
    samples = interleave(
        clock, {"A": clock.variant("A", 50.0)}, rounds=9, budget=1.0, fewest_rounds=4
    )
    assert len(samples["A"]) == 4


def test_nothing_is_collected_meanwhile_and_the_collector_is_left_as_it_was():
    seen = []
    interleave_once = {"A": lambda: seen.append(gc.isenabled())}
    timing.interleave(interleave_once, calls={"A": 1}, rounds=1)
    assert seen == [False]
    assert gc.isenabled()


def test_the_collector_comes_back_after_an_interrupt():
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        timing.interleave({"A": interrupt}, calls={"A": 1}, rounds=1)
    assert gc.isenabled()


def test_the_fastest_variant_fills_a_sample(clock):
    variants = {"A": clock.variant("A", 3e-4), "B": clock.variant("B", 5e-3)}
    assert timing.calls_per_sample(variants, seconds=2e-3, clock=clock) == 7


def test_one_slow_first_call_does_not_shorten_the_samples(clock):
    variants = {"A": clock.variant("A", 8.0, 1.0)}
    assert timing.calls_per_sample(variants, seconds=2.0, clock=clock) == 2


def test_a_slow_variant_is_called_once(clock):
    variants = {"A": clock.variant("A", 9.0)}
    assert timing.calls_per_sample(variants, seconds=2e-3, clock=clock) == 1


def test_a_clock_too_coarse_to_see_a_call_gives_the_most_calls(clock):
    variants = {"A": clock.variant("A", 0.0)}
    assert timing.calls_per_sample(variants, seconds=2e-3, clock=clock) == 1000


@pytest.mark.parametrize(
    ("samples", "median"), [([5.0], 5.0), ([3.0, 1.0, 9.0], 3.0), ([1.0, 2.0], 1.5)]
)
def test_a_spread_tells_the_extremes_and_the_middle(samples, median):
    assert Spread.of(samples) == Spread(min(samples), median, max(samples))


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([5.0], Quartiles(5.0, 5.0, 5.0, 5.0, 5.0)),
        ([4.0, 0.0, 1.0, 3.0, 2.0], Quartiles(0.0, 2.0, 4.0, 1.0, 3.0)),
    ],
)
def test_quartiles_hold_the_middle_half(samples, expected):
    assert Quartiles.of(samples) == expected


def test_the_ratio_is_taken_round_by_round():
    # A machine that turns ten times slower in the last rounds changes no ratio. The
    # ratio of the medians would be 20 / 2.
    ours, theirs = [1.0, 2.0, 10.0, 10.0, 1.0], [2.0, 4.0, 20.0, 20.0, 20.0]
    assert timing.median_ratio(theirs, ours) == 2.0


def test_rounds_that_do_not_pair_up_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        timing.median_ratio([1.0, 2.0], [1.0])
