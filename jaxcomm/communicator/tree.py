"""The tree along which many processes tell each other values.

Processes are numbered by their place in a sorted set. Blocks of :data:`FAN_IN` of them
tell the first of the block, its leader. Leaders form blocks in turn, up to place 0. A
leader passes on one bundle. In it, neighbors with equal values are a run: a count and
the value. So a bundle is small wherever most processes say the same.
"""

import itertools
import json
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

# Blocks of this size are told to their leader by one message of each member. So sets of
# this size need no tree.
FAN_IN = 32

# [count, value] of neighbors with equal values, in order.
Runs = list[list[Any]]


def strides(size: int) -> Iterator[int]:
    """Yield the distance of neighbors in a block, from the leaves to the root."""
    stride = 1
    yield stride
    while (stride := stride * FAN_IN) < size:
        yield stride


def members(place: int, stride: int, size: int) -> range:
    """Return the places of the block that the process at ``place`` leads."""
    return range(place, min(place + stride * FAN_IN, size), stride)


def leader(place: int, stride: int) -> int:
    """Return the place that leads the block of ``place``."""
    return place - place % (stride * FAN_IN)


def join(parts: Iterable[Runs]) -> Runs:
    """Return the runs of neighbors as those of all of them."""
    joined: Runs = []
    for count, value in itertools.chain.from_iterable(parts):
        if joined and _same(joined[-1][1], value):
            joined[-1][0] += count
        else:
            joined.append([count, value])
    return joined


def expand(runs: Runs, processes: Sequence[int]) -> dict[int, Any]:
    """Return the value of each process."""
    values = itertools.chain.from_iterable(
        itertools.repeat(value, count) for count, value in runs
    )
    return dict(zip(processes, values, strict=True))


def missing(came: Callable[[int, int], Container[int]], size: int) -> Iterator[int]:
    """Yield the places of those that did not come, and of leaders that are slow.

    Args:
      came: returns, by stride and leader, the places in a block that told the leader.
      size: of the set.
    """
    *_, top = strides(size)
    yield from _missing(came, top, 0, size)


def _missing(came, stride, place, size):
    there = came(stride, place)
    nobody = True
    for one in members(place, stride, size):
        if one not in there:
            nobody = False
            if stride == 1:
                yield one
            else:
                yield from _missing(came, stride // FAN_IN, one, size)
    if nobody:
        # All told it, and it did not pass that on.
        yield place


def _same(value: Any, other: Any) -> bool:
    # In Python True equals 1 and 1.0.
    return value is other or json.dumps(value) == json.dumps(other)
