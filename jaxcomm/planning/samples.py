"""What a calibration measured, between and beyond the sizes that it measured."""

import math
from collections.abc import Sequence

from jaxcomm.machine import Machine, Sample


def nearest(
    machine: Machine, collective: str, transport: str, ranks: int
) -> list[Sample]:
    """Return the samples of a collective whose group is most like one of ``ranks``.

    Sorted by bytes; empty if the calibration has none of this transport.
    """
    found = [
        each
        for each in machine.samples
        if (each.collective, each.transport) == (collective, transport)
    ]
    if not found:
        return []
    size = min(
        {each.ranks for each in found},
        key=lambda known: (abs(math.log(known / ranks)), known),
    )
    return sorted(
        (each for each in found if each.ranks == size), key=lambda each: each.bytes
    )


def interpolate(samples: Sequence[Sample], size: float) -> tuple[float, bool]:
    """Return the seconds at some bytes, and whether they lie between samples.

    In between, on a straight line: a latency and a rate. Below the least it takes as
    long as the least. Above the most it takes in proportion.

    >>> at = [Sample("permute", "memory", 2, 1000, 1.0),
    ...       Sample("permute", "memory", 2, 4000, 2.0)]
    >>> interpolate(at, 2000)
    (1.333..., True)
    >>> interpolate(at, 8000), interpolate(at, 10)
    ((4.0, False), (1.0, False))
    """
    first, last = samples[0], samples[-1]
    if size <= first.bytes:
        return first.seconds, size == first.bytes
    if size >= last.bytes:
        return last.seconds * size / last.bytes, size == last.bytes
    above = next(i for i, each in enumerate(samples) if each.bytes >= size)
    low, high = samples[above - 1], samples[above]
    part = (size - low.bytes) / (high.bytes - low.bytes)
    return low.seconds + part * (high.seconds - low.seconds), True
