"""Which keys each rank needs of the others, before a program runs, and the hops."""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.attention.kernels.kernel import Hop
from jaxcomm.attention.kernels.selection import narrowed
from jaxcomm.attention.layout import Layout, knows_all_ranks, positions_here
from jaxcomm.attention.mask import Coordinates, Mask
from jaxcomm.attention.pairs import Block, Pairs, Run
from jaxcomm.attention.schedules import Schedule
from jaxcomm.attention.strategies.strategy import (
    AttentionCall,
    Inputs,
    Keys,
    Problem,
    columns_of,
    coordinates_of,
)


class Slice(NamedTuple):
    """A slice of the keys of another rank.

    Attributes:
      shift: the slice is of the keys of rank ``(rank - shift) % size``.
      start, stop: the slice of that rank's keys.
    """

    shift: int
    start: int
    stop: int


@functools.lru_cache(maxsize=256)
def seen_slices(queries: Layout, keys: Layout, mask: Mask) -> tuple[Slice, ...]:
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
                for firsts, lasts in seen:
                    first, last = firsts[rank], min(lasts[rank], mask.key_length - 1)
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
                first, end = int(start) + min(low), int(start) + max(high)
                found.append(Slice(shift, first, end))
    return tuple(sorted(found))


def _seen_by_rank(queries: Layout, mask: Mask) -> list[tuple]:
    """Return for each segment of the queries the first and last key each rank sees.

    There is none where the last is below the first.
    """
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
        found.append((low, high))
    return found


def blocks_of(
    queries: Layout, keys: Layout, mask: Mask, held: int
) -> tuple[tuple[Block, ...] | str, tuple[Block, ...] | str]:
    """Return what a rank sees of its own keys in a hop, and what of those of others.

    Returns:
      Blocks, of which a hop is one, those of others by earlier and later ranks; or, in
      words, why none are known before the program runs.
    """
    if not (queries.is_static and keys.is_static):
        why_none = "the layout is data, and blocks are rules"
        return why_none, why_none
    count = queries.local_length
    totals = tuple(each.size * each.local_length for each in (queries, keys))
    if (mask.query_length, mask.key_length) != totals:
        why_none = (
            f"the {queries.size} ranks hold {totals[0]} queries and {totals[1]} keys, "
            f"of which {mask.query_length} and {mask.key_length} are no padding, and "
            "it masks no padding"
        )
        return why_none, why_none
    if mask.is_everything:
        whole = (Block((0, count), (0, held)),)
        return whole, whole
    is_one_sequence = queries == keys
    if mask.is_causal and is_one_sequence:
        found = queries.schedule.blocks(count)
        if found is not None:
            return found[:1], tuple(dict.fromkeys(found[1:]))
    why_none = "it takes a window where a rank's keys are its own, without a gap"
    if mask.is_causal:
        why_none = (
            f"the schedule {queries.schedule.name!r} does not say which blocks a "
            "causal ring computes"
        )
    if not is_one_sequence or len(consecutive(queries)) != 1:
        return why_none, why_none
    # A window that reaches the first key is none.
    left = mask.left if (mask.left or 0) < count - 1 else None
    return (Block((0, count), (0, count), left, mask.right),), why_none


def consecutive(layout: Layout) -> tuple[tuple[int, int], ...]:
    """Return the parts of each rank's tokens whose positions ascend by one.

    Empty if the positions jump within a segment of the layout, or are data.

    >>> consecutive(Layout("zigzag", 2, 8))
    ((0, 2), (2, 4))
    """
    if not layout.is_static:
        return ()
    return _consecutive(layout.schedule, layout.size, layout.local_length)


@functools.lru_cache(maxsize=64)
def _consecutive(schedule: Schedule, size: int, length: int):
    steps = np.diff(schedule.shard(size, length).reshape(size, length), axis=1)
    jumps = np.flatnonzero((steps != 1).any(0)) + 1
    inner = np.cumsum(schedule.segments(length))[:-1]
    if not np.isin(jumps, inner).all():
        return ()
    return tuple(itertools.pairwise((0, *jumps.tolist(), length)))


_EXCHANGED = "ranks exchange heads around a ring"


def hops_of(
    call: AttentionCall, inputs: Inputs, width: int = 1, has_others: bool = False
) -> tuple[Hop, Hop]:
    """Return the hop of a rank's own keys, and what those of other keys have in common.

    They know which kernels may compute them. Blocks of the second are those of earlier
    ranks and of later ones. If there are no others, it is the first.

    Raises:
      ValueError: the kernel that was asked for cannot compute it.
    """
    own, layouts = _known(call, inputs, width), (inputs.query_layout, inputs.key_layout)
    others = own
    if width > 1:
        own = narrowed(own, _EXCHANGED)
        return own, own
    rows, held = (x.local_length for x in layouts)
    has_ids = inputs.key_ids is not None
    # Padding is told by its segment ids alone.
    if call.is_self and (call.mask.query_length == call.size * rows or has_ids):
        is_consecutive = len(consecutive(layouts[0])) == 1
        run = Run((0, rows), (0, rows), "same", is_consecutive)
        own = own.with_pairs(runs=(run,))
    if call.is_self and has_ids:
        run = Run((0, rows), (0, held), "apart", False)
        others = others.with_pairs(runs=(run,))
    of_own, of_others = blocks_of(*layouts, call.mask, held)
    own = narrowed(own, of_own)
    return own, narrowed(others, of_others) if has_others else own


def hop_of_block(
    hop: Hop, call: AttentionCall, inputs: Inputs, width: int, block: Keys, distance
) -> Hop:
    """Return the hop of the keys of member ``me - distance``."""
    count = block.key.shape[1]
    me, source = members_at(call, width, distance)
    of_queries = inputs.query_ids, inputs.query_range
    of_keys = block.segment_ids, block.range
    if knows_all_ranks(inputs.query_layout):
        queries = coordinates_of(inputs.query_layout, me, width, *of_queries)
        keys = Coordinates(queries.positions, *of_keys)
        if source is not me or inputs.query_layout != inputs.key_layout:
            keys = coordinates_of(inputs.key_layout, source, width, *of_keys)
    else:  # A rank's own keys.
        at = positions_here(inputs.query_layout, me)
        queries, keys = (Coordinates(at, *known) for known in (of_queries, of_keys))
    which = None
    if len(hop.pairs.blocks) > 1:
        # Ranks are in the order of their first positions: see Schedule.
        is_later = queries.positions[0] < keys.positions[0]
        which = is_later.astype(jnp.int32)
    bias = columns_of(inputs.bias, source * count, count)
    hop = hop.with_pairs(queries=queries, keys=keys, block=which)
    return hop.replace(
        key=block.key, value=block.value, scores=hop.scores.replace(bias=bias)
    )


def members_at(call: AttentionCall, width: int, distance):
    """Return the index of this member, and of the one at a distance before it."""
    if call.size == width:
        return 0, 0
    me = call.rank()
    if width > 1:
        me //= width
    is_own = isinstance(distance, int) and not distance
    return me, me if is_own else (me - distance) % (call.size // width)


def _known(call: AttentionCall, inputs: Inputs, width: int) -> Hop:
    """Return what all hops have in common."""
    layouts, count = (inputs.query_layout, inputs.key_layout), inputs.key.shape[1]

    def abstract(layout, *known):
        rows = () if layout.is_static else layout.order.shape[:-2]
        shape = (*rows, width * layout.local_length)
        return Coordinates(jax.ShapeDtypeStruct(shape, jnp.int32), *known)

    bias = inputs.bias
    if bias is not None:
        bias = jax.ShapeDtypeStruct((*bias.shape[:3], count), bias.dtype)
    return call.hop.replace(
        query=inputs.query,
        key=inputs.key,
        value=inputs.value,
        scores=call.scores(inputs, bias),
        pairs=Pairs(
            call.mask,
            queries=abstract(layouts[0], inputs.query_ids, inputs.query_range),
            keys=abstract(layouts[1], inputs.key_ids, inputs.key_range),
            segments=(layouts[0].segments * width, layouts[1].segments * width),
        ),
    )


def distances(of: Inputs | Problem, mask: Mask, width: int) -> tuple[int, ...]:
    """Return the distances at which some rank sees a key; all where a layout is data.

    Below Ulysses a member is several ranks: one of them needs the block.
    """
    layouts, found = (of.query_layout, of.key_layout), {0}
    members = layouts[1].size // width
    if not (layouts[0].is_static and layouts[1].is_static):
        return tuple(range(members))
    for part in seen_slices(*layouts, mask):
        # Ranks i and i - shift: their members are one of two apart.
        found |= {part.shift // width % members, -(-part.shift // width) % members}
    if len(found) > members // 2 + 1:
        return tuple(range(max(found) + 1))
    return tuple(sorted(found))
