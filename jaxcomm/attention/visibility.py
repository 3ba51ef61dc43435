"""What each rank needs of the others, as far as it is known before a program runs."""

import functools
import itertools
from typing import NamedTuple

import numpy as np

from jaxcomm.attention.layout import Layout
from jaxcomm.attention.mask import Mask
from jaxcomm.attention.schedules.block import Block, Blocks


class Piece(NamedTuple):
    """A slice of the keys of another rank.

    Attributes:
      shift: the slice is of the keys of rank ``(rank - shift) % size``.
      start, stop: the slice of that rank's keys.
    """

    shift: int
    start: int
    stop: int


class _Interval(NamedTuple):
    """Positions from ``first`` to ``last``; none if ``last < first``."""

    first: np.ndarray
    last: np.ndarray


def visible_shifts(queries: Layout, keys: Layout, mask: Mask) -> tuple[int, ...]:
    """Return the shifts h at which some rank sees a key of rank ``(rank - h) % size``.

    Shift 0 is always among them. Where a layout is data, all shifts are.

    >>> layout = Layout("contiguous", 8, 64)
    >>> visible_shifts(layout, layout, Mask(8, 0, 64, 64))
    (0, 1)
    """
    if not (queries.is_static and keys.is_static):
        return tuple(range(keys.size))
    return tuple(sorted({0} | {piece.shift for piece in pieces(queries, keys, mask)}))


@functools.lru_cache(maxsize=256)
def pieces(queries: Layout, keys: Layout, mask: Mask) -> tuple[Piece, ...]:
    """Return the slices of the keys of other ranks that some rank sees, by shift.

    All ranks send the same slices: each is the smallest that serves every rank. Both
    layouts must be rules.
    """
    size = keys.size
    seen = _seen_by_rank(queries, mask)
    found = []
    ends = np.cumsum((0, *keys.segments))
    held = np.stack([keys.positions_of(rank) for rank in range(size)])
    for start, stop in itertools.pairwise(ends):
        part = np.minimum(held[:, start:stop], mask.key_length)
        is_sorted = bool((np.diff(held[:, start:stop], axis=1) > 0).all())
        for shift in range(1, size):
            source = (np.arange(size) - shift) % size
            low, high = [], []
            for rank, at in enumerate(source):
                for interval in seen:
                    first, last = interval.first[rank], interval.last[rank]
                    last = min(last, mask.key_length - 1)
                    if is_sorted:
                        a = int(np.searchsorted(part[at], first, "left"))
                        b = int(np.searchsorted(part[at], last, "right"))
                    else:
                        inside = (part[at] >= first) & (part[at] <= last)
                        a, b = (0, stop - start) if inside.any() else (0, 0)
                    if a < b:
                        low.append(a)
                        high.append(b)
            if low:
                piece = (shift, int(start) + min(low), int(start) + max(high))
                found.append(Piece(*piece))
    return tuple(sorted(found))


def _seen_by_rank(queries: Layout, mask: Mask) -> list[_Interval]:
    """Return for each segment of the queries which key positions each rank sees."""
    found = []
    ends = np.cumsum((0, *queries.segments))
    held = [queries.positions_of(rank) for rank in range(queries.size)]
    for start, stop in itertools.pairwise(ends):
        if start == stop:
            continue
        part = np.stack([x[start:stop] for x in held]).astype(np.int64)
        is_real = part < mask.query_length
        nothing = ~is_real.any(1)
        first = np.where(is_real, part, np.iinfo(np.int64).max).min(1)
        last = np.where(is_real, part, -1).max(1)
        far = np.int64(1) << 40
        low = np.zeros_like(first) if mask.left is None else first - mask.left
        high = np.full_like(last, far) if mask.right is None else last + mask.right
        low, high = np.where(nothing, 0, low), np.where(nothing, -1, high)
        found.append(_Interval(low, high))
    return found


def blocks_of(queries: Layout, keys: Layout, mask: Mask, held: int) -> Blocks | str:
    """Return what a rank sees of the keys of a hop, by whose they are.

    Args:
      queries, keys: who holds which positions.
      mask: of the call.
      held: keys of a hop.

    Returns:
      The blocks; or, in words, why none are known before the program runs.
    """
    if not (queries.is_static and keys.is_static):
        return "the layout is data, and blocks are rules"
    count = queries.local_length
    totals = tuple(each.size * each.local_length for each in (queries, keys))
    if (mask.query_length, mask.key_length) != totals:
        return (
            f"the {queries.size} ranks hold {totals[0]} queries and {totals[1]} keys, "
            f"of which {mask.query_length} and {mask.key_length} are no padding, and "
            "it masks no padding"
        )
    whole = (0, count), (0, held)
    if mask.is_everything:
        return Blocks(*[Block(*whole)] * 3)
    is_one_sequence = queries == keys
    if queries.size == 1 and is_one_sequence and queries.is_natural:
        # A window that reaches the first key is none.
        left = mask.left if (mask.left or 0) < held - 1 else None
        return Blocks(*[Block(*whole, left, mask.right)] * 3)
    if not mask.is_causal:
        return "it takes a window where one rank holds all tokens in natural order"
    found = queries.schedule.blocks(count) if is_one_sequence else None
    if found is None:
        return (
            f"the schedule {queries.schedule.name!r} does not say which blocks a "
            "causal ring computes"
        )
    return found
