"""What ranks see of each other's documents, computed where tokens are dealt.

On a GPU it would cost some forty small kernels and two collectives in each layer.
"""

import collections
import itertools
from typing import NamedTuple

import numpy as np

from jaxcomm.attention.mask import PADDING
from jaxcomm.attention.table import (
    ALL,
    MANY,
    NONE,
    OWN,
    SHARES,
    Few,
    few,
    lengths,
    listed,
    most,
)

# A table has some thousand numbers of a rank for each other one.
_MOST_RANKS = 16


def table_of(positions, ids, size: int):
    """Return the tables of all ranks, or None where there are none.

    Args:
      positions: int32 (..., size * T), those that ranks hold, in rank order.
      ids: int32 of that shape, the document of each token, negative for padding.
      size: number of ranks.

    Returns:
      int32 (..., size * width).
    """
    is_known = isinstance(ids, np.ndarray) and isinstance(positions, np.ndarray)
    if not is_known or ids.ndim > 2 or not ids.size or not 1 < size <= _MOST_RANKS:
        return None
    positions = np.broadcast_to(positions, ids.shape)
    rows = [
        _of_row(*(x.reshape(size, -1) for x in row))
        for row in zip(np.atleast_2d(positions), np.atleast_2d(ids), strict=True)
    ]
    return np.stack(rows).astype(np.int32).reshape(*ids.shape[:-1], -1)


class _Piece(NamedTuple):
    start: int
    end: int
    document: int
    first: int


def _of_row(positions, ids) -> np.ndarray:
    """Return the numbers of each rank, (size * width,), of (size, T) each."""
    size, tokens = ids.shape
    count = most(tokens)
    held = [_pieces(*rank) for rank in zip(positions, ids, strict=True)]
    own = [_sequences(of_rank) for of_rank in held]
    serves = all(
        max(len(x), len(y)) <= count and _ascend(x)
        for x, y in zip(held, own, strict=True)
    )
    # What rank i sees of rank j; and what each of its pieces sees of all others.
    seen: list[list[list]] = [[[] for _ in range(size)] for _ in range(size)]
    views: list[list[_View]] = [[] for _ in range(size)]
    holders = collections.defaultdict(list)
    for rank, of_rank in enumerate(held):
        for document in {x.document for x in of_rank if x.document >= 0}:
            holders[document].append(rank)
    for document, ranks in sorted(holders.items()):
        pieces = {r: [x for x in held[r] if x.document == document] for r in ranks}
        for rank, other in itertools.permutations(ranks, 2):
            found, is_all = _seen(pieces[rank], pieces[other])
            serves &= is_all  # A program may send all keys around a ring.
            if found is not None:
                seen[rank][other].append(found)
        for rank in ranks:
            others = [(r, x) for r in ranks if r != rank for x in pieces[r]]
            views[rank] += [_view(piece, others) for piece in pieces[rank]]
    views = [[view for view in of_rank if view.keys] for of_rank in views]
    needed = _needed(views, tokens)
    is_listed = serves and all(_at_most_twice(x, needed.shape) for x in views)
    by_measure = {
        way: _few_of(views, needed, way) if is_listed else None for way in SHARES
    }
    way = ALL if serves else NONE
    for measure in reversed(SHARES):
        if by_measure[measure] is None:
            break
        way = measure if needed.any() else OWN
    nothing = tokens, tokens, PADDING
    every = [_padded([x[:3] for x in of], nothing, count) for of in held]
    numbers = []
    for rank in range(size):
        of_measures = [
            _padded_few(None if found is None else found[rank], measure, size)
            for measure, found in by_measure.items()
        ]
        others = [
            _padded(seen[rank][rank - distance], (tokens,) * 4, count + 1)
            for distance in range(1, size)
        ]
        own_starts = _padded(own[rank], (tokens,) * 2, count + 1)
        parts = (way, own_starts, *itertools.chain(*zip(*of_measures, strict=True)))
        numbers += [np.array(x).reshape(-1) for x in (*parts, others, every)]
    return np.concatenate(numbers)


class _View(NamedTuple):
    """What the queries of a piece see of other ranks' keys.

    Attributes:
      start, end: the queries.
      keys: rank, first and end of keys.
    """

    start: int
    end: int
    keys: list[tuple[int, int, int]]


def _view(piece: _Piece, others: list[tuple[int, _Piece]]) -> _View:
    """Return what a piece sees of those of its document that other ranks hold."""
    found: list[tuple[int, int, int]] = []
    for rank, x in others:
        if x.first >= piece.first:
            continue
        start = x.start
        if found and (found[-1][0], found[-1][2]) == (rank, start):
            start = found.pop()[1]
        found.append((rank, start, x.end))
    return _View(piece.start, piece.end, found)


def _needed(views: list[list[_View]], tokens: int) -> np.ndarray:
    """Return which queries of each rank see keys of others, and which keys are seen.

    Returns:
      bool (2, ranks, tokens).
    """
    found = np.zeros((2, len(views), tokens), bool)
    for rank, of_rank in enumerate(views):
        for view in of_rank:
            found[0, rank, view.start : view.end] = True
            for other, first, end in view.keys:
                found[1, other, first:end] = True
    return found


def _few_of(views: list[list[_View]], needed: np.ndarray, way: int):
    """Return what the one call of each rank is, if so many tokens are few; else None.

    Returns:
      The parts of a :class:`Few`, for each rank.
    """
    _, size, tokens = needed.shape
    count = few(tokens, way)
    if needed.sum(2).max() > count:
        return None
    if way == MANY:
        places = [np.arange(tokens)] * size
        picked = [(places, [[]] * size)] * 2
    else:
        picked = [
            tuple(zip(*(_picked(_runs(x), tokens, count) for x in each), strict=True))
            for each in needed
        ]
    (numbers, queries), (key_numbers, keys) = picked
    calls = [
        _call_of(*each, key_numbers, count) for each in zip(views, numbers, strict=True)
    ]
    if None in calls:
        return None
    lists, starts = zip(*calls, strict=True)
    of_all = queries, keys, lists, starts
    room = lengths(way, size)
    if any(max(map(len, x)) > n for x, n in zip(of_all, room, strict=True)):
        return None
    return [Few(*each) for each in zip(*of_all, strict=True)]


def _runs(is_needed: np.ndarray) -> list[tuple[int, int]]:
    """Return where tokens in a row are needed: first and end of each run."""
    changes = np.flatnonzero(np.diff(np.pad(is_needed.astype(int), 1)))
    return [(int(x), int(y)) for x, y in changes.reshape(-1, 2)]


def _picked(runs: list[tuple[int, int]], tokens: int, count: int):
    """Return the number of each token among the few, and the parts of these.

    First come the runs, in their order. Others fill up what is few: they see nothing
    of others, or are not seen, and the kernel is told so.
    """
    numbers, parts, at = np.full(tokens, -1), [], 0
    for first, end in runs:
        parts.append((at, first))
        numbers[first:end] = np.arange(at, at + end - first)
        at += end - first
    is_free = numbers < 0
    is_free[np.flatnonzero(is_free)[count - at :]] = False
    for first, end in _runs(is_free):
        parts.append((at, first))
        at += end - first
    return numbers, parts


def _at_most_twice(views: list[_View], shape) -> bool:
    """Return whether a rank's pieces see each key at most twice."""
    found = np.zeros(shape[1:], int)
    for view in views:
        for other, first, end in view.keys:
            found[other, first:end] += 1
    return found.max(initial=0) <= 2


def _padded_few(found: Few | None, way: int, size: int) -> Few:
    """Return the numbers of a rank; zeros where there are none."""
    behind = np.iinfo(np.int32).max, 0
    counts = lengths(way, size)
    if found is None:
        return Few(*(np.zeros((2, n), int) for n in counts))
    last = found.starts[-1]
    return Few(
        *(_padded(*x) for x in zip(found, (behind,) * 3 + (last,), counts, strict=True))
    )


def _call_of(views: list[_View], numbers, key_numbers, count: int):
    """Return the one call of a rank: the parts of the listed keys, and the starts.

    Queries are those few of the rank, keys are listed for each sequence. Sequences
    leave no query out: between those that see are those that see nothing. None if
    there are more keys than can be listed.

    Args:
      numbers: of the queries among the few, (tokens,).
      key_numbers: the same of each rank's keys.
    """
    parts, starts, before = [], [], (0, 0)
    for view in sorted(views):
        begin = int(numbers[view.start]), before[1]
        starts += [*_between(before, begin), begin]
        at = before[1]
        for other, first, end in view.keys:
            parts.append((at, other * count + int(key_numbers[other][first])))
            at += end - first
        before = begin[0] + view.end - view.start, at
    end = count, before[1]
    if end[1] > listed(count, len(key_numbers)):
        return None
    behind = len(key_numbers) * count
    return [*parts, (end[1], behind)], [*starts, *_between(before, end), end]


def _between(before: tuple[int, int], begin: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the sequence of queries without keys before another begins."""
    return [before] if before[0] < begin[0] else []


def _pieces(positions, ids) -> list[_Piece]:
    jumps = (positions[1:] != positions[:-1] + 1) & (ids[1:] >= 0)
    starts = np.flatnonzero((ids[1:] != ids[:-1]) | jumps) + 1
    starts = [0, *starts.tolist()]
    ends = [*starts[1:], len(ids)]
    return [
        _Piece(start, end, int(ids[start]), int(positions[start]))
        for start, end in zip(starts, ends, strict=True)
    ]


def _ascend(pieces: list[_Piece]) -> bool:
    """Return whether documents ascend, and in each nothing lies between."""
    last: _Piece | None = None
    for piece in pieces:
        if piece.document < 0:
            continue
        if last is not None:
            if (piece.document, piece.first) <= (last.document, last.first):
                return False
            if piece.document == last.document and piece.start != last.end:
                return False
        last = piece
    return True


def _sequences(pieces: list[_Piece]) -> list[tuple[int, int]]:
    """Return where the sequences of a rank's own tokens begin.

    A document is one. Padding is two: of queries without keys, and of its keys, which
    no query sees.
    """
    found: list[tuple[int, int]] = []
    last = None
    for piece in pieces:
        if piece.document < 0:
            found += [(piece.start, piece.start), (piece.end, piece.start)]
        elif piece.document != last:
            found.append((piece.start, piece.start))
        last = piece.document
    return found


def _seen(queries: list[_Piece], keys: list[_Piece]):
    """Return which queries of a document see which keys, and whether that is all."""
    found, is_all = None, True
    for piece in queries:
        seen = [x for x in keys if x.first < piece.first]
        if not seen:
            continue
        ends = min(x.start for x in seen), max(x.end for x in seen)
        if found is None:
            found = piece.start, queries[-1].end, *ends
        else:
            is_all &= found[3] == ends[1]
    return found, is_all


def _padded(rows: list, padding: tuple, count: int) -> np.ndarray:
    """Return (numbers of a row, count): the last rows are padding."""
    rows = [*rows[:count], *[padding] * (count - len(rows))]
    return np.array(rows).T
