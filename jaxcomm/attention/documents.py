"""A layout for packed documents, balanced by what a causal mask computes."""

import random
from collections.abc import Sequence

import jax
import numpy as np

from jaxcomm.attention.layout import Layout
from jaxcomm.attention.mask import PADDING
from jaxcomm.attention.schedules import Schedule
from jaxcomm.attention.table import FEW, FEWEST, MANY, few
from jaxcomm.primitives import arguments

# What it costs that ranks see keys of others, with gradients, as keys that a query
# sees, for each token of a rank: on two ranks, and for each more. Few tokens do, by a
# measure, or many. Measured on two H100s and on four H200s, 32 query and 8 key heads
# of 128, by `make bench ARGS="gpu --only documents"`: 321, 449, 764 and 321, 459, 1233.
# All keys of more than 512 MiB go around a ring on four, too: 1640. Of arrays nothing
# is known here.
_PRICES = {FEWEST: (320, 0), FEW: (450, 0), MANY: (760, 240)}
# What costs no more than this over the mean is good enough: of whole documents, and
# where long ones are cut.
_EVEN, _BALANCED = 1.02, 1.05
# In how many orders whole documents are dealt, and how often some then change places.
_DEALS, _CHANGES = 16, 64
# Beside so many documents that are cut, the others are dealt like that, too.
_FEW_CUT = 4


class Documents(Schedule):
    """The schedule of a layout that is data: it has no rule."""

    name = "documents"

    def positions(self, rank, size, length):
        raise TypeError(
            "The schedule 'documents' has no rule for positions. Use the layout that "
            "jaxcomm.attention.document_layout returned."
        )


def document_layout(
    lengths: Sequence[int] | Sequence[Sequence[int]], size: int
) -> Layout:
    """Deal packed documents: whole ones to one rank, long ones in zigzag to all.

    Every rank gets as many tokens, and about as much work of a causal mask within
    documents. Documents stay whole where that is faster: what a rank computes more than
    others is weighed against what it costs to send keys. What its ``reorder`` returns
    is data: a compiled program that takes batch and tokens as arguments serves other
    documents of the same total length too.

    Source: FlashCP, 2026; PyTorch, per-document head-tail load balancing, 2025.

    Args:
      lengths: tokens of each document, in the order in which they are packed. Or one
        such sequence for each row of a batch, of equal sums.
      size: number of ranks.

    Returns:
      A layout of ``sum(lengths)`` tokens. Its ``order`` is a numpy array, (size, local
      length) or (B, size, local length).

    Raises:
      ValueError: ``size`` is below one, a length is negative, or rows have different
        sums.
      TypeError: a number is no integer.

    >>> document_layout([4, 4], 2).order
    array([[0, 1, 2, 3],
           [4, 5, 6, 7]], dtype=int32)
    """
    size = arguments.integer(size, "document_layout: size")
    if _has_rows(lengths):
        rows = [document_layout(row, size) for row in lengths]  # pyright: ignore
        totals = sorted({row.length for row in rows})
        if len(totals) > 1:
            raise ValueError(
                f"document_layout: the rows have {totals[0]} to {totals[-1]} tokens. "
                "Pass rows of equal sums: count padding as a document."
            )
        orders = np.stack([row.order for row in rows])
        return Layout(Documents(), size, totals[0], orders)
    counts = _counts(lengths)
    layout = Layout(Documents(), size, int(counts.sum()))  # checks the size
    order = _best_order(counts, size)
    return Layout(layout.schedule, size, layout.length, order)


def segment_ids_of(lengths: Sequence[int], length: int | None = None) -> np.ndarray:
    """Return the segment ids of packed documents in natural order.

    Args:
      lengths: tokens of each document: ``np.diff`` of what other libraries call
        ``cu_seqlens``.
      length: tokens of the sequence. What is behind the documents is padding. If None,
        nothing is.

    Returns:
      int32 (length,), for ``segment_ids`` of ``Layout.reorder``.

    Raises:
      ValueError: a length is negative, or the documents are longer than the sequence.
      TypeError: a number is no integer.

    >>> segment_ids_of([2, 3], 7)
    array([ 0,  0,  1,  1,  1, -1, -1], dtype=int32)
    """
    counts = _counts(lengths)
    total = int(counts.sum())
    if length is None:
        length = total
    length = arguments.integer(length, "segment_ids_of: length")
    if length < total:
        raise ValueError(
            f"segment_ids_of: documents of {total} tokens in a sequence of {length}."
        )
    ids = np.full(length, PADDING, np.int32)
    ids[:total] = np.repeat(np.arange(len(counts)), counts)
    return ids


def _has_rows(lengths) -> bool:
    """Say whether there is a sequence of lengths for each row of a batch."""
    if not isinstance(lengths, (Sequence, np.ndarray, jax.Array)):
        return False
    return len(lengths) > 0 and all(np.ndim(row) == 1 for row in lengths)


def _counts(lengths) -> np.ndarray:
    try:
        counts = np.asarray(lengths)
    except (ValueError, jax.errors.TracerArrayConversionError):
        counts = np.array(None)  # numbers beside sequences, or known at run time alone
    if counts.size == 0:
        counts = np.zeros(0, np.int64)
    if not np.issubdtype(counts.dtype, np.integer) or counts.ndim != 1:
        raise TypeError(
            f"lengths={lengths!r}: pass a sequence of integers, the tokens of each "
            "document, known when the program is traced."
        )
    if (counts < 0).any():
        raise ValueError(f"lengths={lengths!r}: a document has no negative length.")
    return counts.astype(np.int64)


def _counts_to_try(documents: int):
    """Yield how many documents to cut: few, then many, at last all."""
    yield from range(min(documents, 16))
    count = 16
    while count < documents:
        yield count
        count += max(1, count // 4)
    yield documents


def _best_order(counts: np.ndarray, size: int) -> np.ndarray:
    """Return the positions of each rank, (size, local length), that cost least."""
    mean = max((counts * (counts + 1) / 2).sum() / size, 1)
    draw, found = random.Random(0), []

    def deal(cut: set[int], ranks=None) -> float:
        order = _deal(counts, size, cut, ranks)
        work, price = _cost(order, counts)
        found.append((work + price, len(found), order))
        return work

    def deal_whole(cut: set[int], is_first: bool) -> float:
        """Deal the others so that none is cut, if there is room."""
        noise = np.array([1 + 0.5 * (not is_first) * draw.random() for _ in counts])
        turns = np.argsort(-counts * noise, kind="stable")
        return deal(cut, _whole(counts, size, turns, cut))

    for number in range(_DEALS):
        deal_whole(set(), not number)
        if found[-1][0] <= _EVEN * mean:
            return found[-1][2]
    longest = np.argsort(-counts, kind="stable").tolist()
    for count in _counts_to_try(len(counts)):
        cut = set(longest[:count])
        works = [deal(cut)]
        if 0 < count <= _FEW_CUT:
            works += [deal_whole(cut, not number) for number in range(_DEALS // 4)]
        if min(works) <= _BALANCED * mean:
            break
    return min(found)[2]


def _cost(order: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Return what the busiest rank computes, and what it costs that others send it."""
    ids = np.append(np.repeat(np.arange(len(counts)), counts), len(counts))
    starts = np.append(np.cumsum(counts) - counts, 0)
    at = np.minimum(order, len(ids) - 1)
    held = ids[at]
    is_token = held < len(counts)
    ranks = np.bincount(
        np.concatenate([np.unique(x) for x in held]), minlength=len(counts) + 1
    )
    most = int(((ranks[held] > 1) & is_token).sum(1).max())
    local = order.shape[1]
    way = next((x for x in (FEWEST, FEW) if most <= few(local, x)), MANY)
    price, of_rank = _PRICES[way] if most else (0, 0)
    price += of_rank * (len(order) - 2)
    work = np.where(is_token, at - starts[held] + 1, 0).sum(1)
    return float(work.max()), float(price * local)


def _shares(total: int, size: int) -> np.ndarray:
    """Return how many of so many tokens each rank has."""
    return total // size + (np.arange(size) < total % size)


def _whole(
    counts: np.ndarray, size: int, order: np.ndarray, cut: set[int]
) -> np.ndarray:
    """Return the rank of each document if no other is cut, int (documents,).

    Each goes to the least busy rank that has room, in an order. Then two change
    places, or one goes elsewhere, as long as that helps the busiest rank or the
    fullest, whose documents would be cut.
    """
    work, ranks = counts * (counts + 1) / 2, np.zeros(len(counts), np.int64)
    of_cut = list(cut)
    held = np.full(size, -(-int(counts[of_cut].sum()) // size))
    busy = np.full(size, work[of_cut].sum() / size)
    ranks[of_cut] = -1
    local = -(-int(counts.sum()) // size)
    for document in order:
        if document in cut:
            continue
        fits = held + counts[document] <= local
        rank = np.argmin(np.where(fits, busy, np.inf) if fits.any() else held)
        ranks[document] = rank
        held[rank] += counts[document]
        busy[rank] += work[document]
    # Nothing is document -1.
    counts, work, price = np.append(counts, 0), np.append(work, 0), local / 16
    least = busy.max() + price * np.maximum(held - local, 0).sum()
    for _ in range(_CHANGES):
        found = []
        for rank in {int(np.argmax(busy)), int(np.argmax(held))}:
            ours = np.append(np.flatnonzero(ranks == rank), -1)
            for other in set(range(size)) - {rank}:
                theirs = np.append(np.flatnonzero(ranks == other), -1)
                moved = counts[ours][:, None] - counts[theirs]
                passed = work[ours][:, None] - work[theirs]
                rest = np.delete(np.arange(size), [rank, other])
                most = np.maximum(busy[rank] - passed, busy[other] + passed)
                most = np.maximum(most, busy[rest].max(initial=0))
                over = np.maximum(held[rank] - moved - local, 0)
                over += np.maximum(held[other] + moved - local, 0)
                over += np.maximum(held[rest] - local, 0).sum()
                cost = most + price * over
                at = np.unravel_index(np.argmin(cost), cost.shape)
                change = rank, other, ours[at[0]], theirs[at[1]]
                found.append((cost[at], change, moved[at], passed[at]))
        if not found or min(found)[0] >= least:
            return ranks
        least, (rank, other, mine, its), moved, passed = min(found)
        for document, to in ((mine, other), (its, rank)):
            if document >= 0:
                ranks[document] = to
        held[[rank, other]] += -moved, moved
        busy[[rank, other]] += -passed, passed
    return ranks


def _deal(counts: np.ndarray, size: int, cut: set[int], ranks=None) -> np.ndarray:
    """Return the positions of each rank, (size, local length), if these are cut.

    Args:
      ranks: to which the others go, if known. What has no room goes elsewhere.
    """
    length = int(counts.sum())
    local = -(-length // size)
    starts = np.cumsum(counts) - counts
    free = np.full(size, local)
    work = np.zeros(size)
    held: list[list[tuple[int, int]]] = [[] for _ in range(size)]

    def place(rank: int, document: int, start: int, stop: int):
        """Give a piece to a rank, and what it has no room for to the emptiest."""
        while start < stop:
            if not free[rank]:
                rank = int(np.argmax(free))
            end = start + min(stop - start, int(free[rank]))
            held[rank].append((starts[document] + start, starts[document] + end))
            free[rank] -= end - start
            work[rank] += (end * (end + 1) - start * (start + 1)) / 2
            start = end

    # Of all that is cut, ranks get as many tokens, but for one: they have room for it.
    before = 0
    for document in sorted(cut):
        total = before + int(counts[document])
        of_rank = _shares(total, size) - _shares(before, size)
        before = total
        chunks = np.concatenate([of_rank // 2, (of_rank - of_rank // 2)[::-1]])
        edges = np.append(0, np.cumsum(chunks))
        for rank in range(size):
            for chunk in (rank, 2 * size - 1 - rank):
                place(rank, document, int(edges[chunk]), int(edges[chunk + 1]))
    for document in np.argsort(-counts, kind="stable").tolist():
        if document in cut:
            continue
        fits = free >= counts[document]
        if ranks is not None:
            rank = int(ranks[document])
        elif fits.any():
            rank = int(np.argmin(np.where(fits, work, np.inf)))
        else:
            rank = int(np.argmax(free))
        place(rank, document, 0, int(counts[document]))
    order = np.zeros((size, local), np.int32)
    padding = length
    for rank, pieces in enumerate(held):
        at = [np.arange(start, stop) for start, stop in sorted(pieces)]
        at.append(np.arange(padding, padding + free[rank]))
        padding += int(free[rank])
        order[rank] = np.concatenate(at)
    return order
