"""Interleaved timing and its statistics. Knows nothing of jax.

On a shared machine a time says little, for it drifts with what others do. Variants
that take turns drift together, so the ratio of neighbours holds: ``A B, B A, A B, ...``
is timed, each round gives one ratio, and their median is what is reported.
"""

import contextlib
import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

# More calls in one sample would average away what the median is there to discard.
_MOST_CALLS = 1000


@dataclasses.dataclass(frozen=True)
class Spread:
    """The samples of one variant, in seconds per call.

    Attributes:
      min: the fastest.
      median: the middle one.
      max: the slowest.
    """

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        """Summarize at least one sample.

        >>> Spread.of([3.0, 1.0, 2.0])
        Spread(min=1.0, median=2.0, max=3.0)
        """
        return cls(min(samples), statistics.median(samples), max(samples))


@dataclasses.dataclass(frozen=True)
class Quartiles(Spread):
    """A spread that also says where the middle half of the samples lies.

    Attributes:
      lower: a quarter of the samples is below.
      upper: a quarter of the samples is above.
    """

    lower: float
    upper: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Quartiles":
        """Summarize at least one sample.

        >>> Quartiles.of([3.0, 1.0, 2.0, 4.0, 9.0])
        Quartiles(min=1.0, median=3.0, max=9.0, lower=2.0, upper=4.0)
        """
        # Of one sample there are no quantiles.
        doubled = [*samples, *samples] if len(samples) == 1 else samples
        lower, median, upper = statistics.quantiles(doubled, n=4, method="inclusive")
        return cls(min(samples), median, max(samples), lower, upper)


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median of the ratios of samples of the same round.

    >>> median_ratio([2.0, 9.0, 8.0], [1.0, 3.0, 2.0])
    3.0
    """
    return statistics.median(
        a / b for a, b in zip(numerators, denominators, strict=True)
    )


def calls_per_sample(
    variants: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Return how often to call every variant so that the fastest fills a sample.

    Args:
      variants: what to call, by name, already compiled and warm.
      seconds: how long a sample lasts at least.
      clock: returns the time in seconds.
    """
    # Of three, the fastest: one slow call would make every sample too short.
    fastest = min(
        _sample(call, 1, clock) for call in variants.values() for _ in range(3)
    )
    if fastest <= 0:
        return _MOST_CALLS
    return min(_MOST_CALLS, max(1, math.ceil(seconds / fastest)))


def interleave(
    variants: Mapping[str, Callable[[], object]],
    *,
    calls: Mapping[str, int],
    rounds: int,
    last: str | None = None,
    fewest_rounds: int = 1,
    budget: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time variants in turn, every second round in the opposite order.

    Args:
      variants: what to call, by name. A call returns when its work is done.
      calls: how often each is called for one sample.
      rounds: samples of each variant.
      last: one that ends every round instead of taking turns. What it leaves in the
        caches then meets the others equally often. If None, all take turns.
      fewest_rounds: samples of each variant even when the budget is spent.
      budget: seconds after which no further round begins.
      clock: returns the time in seconds.

    Returns:
      By name, the seconds per call, one sample a round.

    >>> sorted(interleave({"a": int, "b": str}, calls={"a": 1, "b": 1}, rounds=3))
    ['a', 'b']
    """
    samples: dict[str, list[float]] = {name: [] for name in variants}
    in_turn = [name for name in variants if name != last]
    at_end = [last] if last is not None else []
    began = clock()
    with _without_garbage_collection():
        for turn in range(rounds):
            if turn >= fewest_rounds and clock() - began >= budget:
                break
            for name in in_turn[:: -1 if turn % 2 else 1] + at_end:
                samples[name].append(_sample(variants[name], calls[name], clock))
    return samples


def _sample(call, calls, clock):
    began = clock()
    for _ in range(calls):
        call()
    return (clock() - began) / calls


@contextlib.contextmanager
def _without_garbage_collection():
    """Collect now and not again until the end: a collection takes milliseconds."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
