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
    calls = dict.fromkeys(variants, calls)
    return timing.interleave(variants, calls=calls, clock=clock.monotonic, **options)


@pytest.mark.parametrize(
    ("names", "last", "order"), [("ABC", None, "ABCCBAABC"), ("ABR", "R", "ABRBARABR")]
)
def test_the_order_alternates_but_for_one_that_stays_last(names, last, order, clock):
    variants = {name: clock.variant(name, 1.0) for name in names}
    interleave(clock, variants, rounds=3, last=last)
    assert "".join(clock.order) == order


def test_a_sample_is_the_mean_of_its_calls_of_which_each_has_its_number(clock):
    variants = {"A": clock.variant("A", 1, 2, 3, 6), "R": clock.variant("R", 1.0)}
    calls = {"A": 2, "R": 1}
    samples = timing.interleave(variants, calls=calls, rounds=2, clock=clock.monotonic)
    assert samples == {"A": [1.5, 4.5], "R": [1.0, 1.0]}
    assert "".join(clock.order) == "AARRAA"


def test_a_spent_budget_ends_it_between_rounds_of_which_there_are_the_fewest(clock):
    variants = {name: clock.variant(name, 2.0) for name in "AB"}
    for fewest, rounds in ((1, 2), (4, 4)):
        samples = interleave(
            clock, variants, rounds=99, budget=7.0, fewest_rounds=fewest
        )
        assert [len(of) for of in samples.values()] == [rounds] * 2


def test_nothing_is_collected_meanwhile_and_the_collector_comes_back():
    seen = []

    def interrupt():
        seen.append(gc.isenabled())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        timing.interleave({"A": interrupt}, calls={"A": 1}, rounds=1)
    assert seen == [False]
    assert gc.isenabled()


def test_calls_fill_a_sample(clock):
    for seconds, calls in (
        # The fastest fills a sample of 2 ms.
        ({"A": [3e-4], "B": [5e-3]}, 7),
        # One slow first call does not shorten it; one that is always slow is one.
        ({"A": [8.0, 1.1e-3]}, 2),
        ({"A": [9.0]}, 1),
        # The clock is too coarse to see a call: the most calls.
        ({"A": [0.0]}, 1000),
    ):
        variants = {name: clock.variant(name, *of) for name, of in seconds.items()}
        found = timing.calls_per_sample(variants, seconds=2e-3, clock=clock.monotonic)
        assert found == calls


def test_spreads_tell_the_extremes_the_middle_and_the_middle_half():
    for samples, median in (([5.0], 5.0), ([3.0, 1.0, 9.0], 3.0), ([1.0, 2.0], 1.5)):
        assert Spread.of(samples) == Spread(min(samples), median, max(samples))
    assert Quartiles.of([5.0]) == Quartiles(5.0, 5.0, 5.0, 5.0, 5.0)
    found = Quartiles.of([4.0, 0.0, 1.0, 3.0, 2.0])
    assert found == Quartiles(0.0, 2.0, 4.0, 1.0, 3.0)
    # A ratio is taken round by round: a machine that turns ten times slower in the last
    # rounds changes none. The ratio of the medians would be 20 / 2.
    ours, theirs = [1.0, 2.0, 10.0, 10.0, 1.0], [2.0, 4.0, 20.0, 20.0, 20.0]
    assert timing.median_ratio(theirs, ours) == 2.0
