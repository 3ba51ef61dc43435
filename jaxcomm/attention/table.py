"""What ranks see of each other's documents, computed where tokens are dealt.

On a GPU it would cost some forty small kernels and two collectives in each layer.
"""

import collections
import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from jaxcomm.attention.mask import PADDING

# Documents of a rank in a row, of which one is cut into at most as many pieces. A
# kernel looks at as many sequences as it is told: backward 64 cost 1.07 times as much
# as the exact number did (24 documents in 32,768 tokens, one H100).
MOST = 64
# Of a ring: no rank sees another's keys; few tokens do, or are seen, by one of two
# measures; any may. Or the table serves none of these.
OWN, FEWEST, FEW, ALL, NONE = range(5)
# The part of the tokens that are few.
SHARES = {FEWEST: 8, FEW: 4}
# With more ranks a row of the table is longer than its tokens.
_MOST_RANKS = 16


class Table(NamedTuple):
    """What a causal mask within documents lets one rank see, of each row.

    int32 (B, ...). A piece is tokens of one document whose positions leave none out.
    Places are numbers of tokens in a row. What is not there is behind all tokens.

    Attributes:
      way: OWN, FEWEST, FEW, ALL or NONE. The same on all ranks. NONE where documents do
        not ascend, or a rank has more than ``MOST`` of them.
      at: (measures, 1 + ranks): by each of ``SHARES`` the first of the few queries of
        this rank; and of the few keys of each. Nothing where the way is a later one.
      own: (2, MOST + 1): where sequences of the own tokens begin, and where the last
        ends: the first query and the first key of each.
      few: (measures, 2, some): the same of the one call for the few tokens, which is
        that of :func:`_call_of`.
      seen: (ranks - 1, 4, MOST + 1): of the keys of the rank so far before, the queries
        and the keys that all of them see: first and end of both.
      every: (ranks, 3, MOST): first token, end and document of the pieces of each rank.
    """

    way: Any
    at: Any
    own: Any
    few: Any
    seen: Any
    every: Any

    @classmethod
    def of(cls, numbers, size: int) -> "Table":
        """Return the parts of int32 (B, :func:`width`)."""
        found, at = [], 0
        for shape in _shapes(size):
            count = math.prod(shape)
            part = numbers[:, at : at + count]
            found.append(part.reshape(-1, *shape))
            at += count
        return cls(*found)


def _shapes(size: int):
    few = (len(SHARES), 1 + size), (len(SHARES), 2, _calls(size) + 1)
    others = (size - 1, 4, MOST + 1), (size, 3, MOST)
    return (), few[0], (2, MOST + 1), few[1], *others


def _calls(size: int) -> int:
    """Return the sequences of the one call: of a document that is cut there are three.

    One that is dealt to all ranks is seen from each.
    """
    return 4 * size + 16


def few(tokens: int, way: int = FEW) -> int:
    """Return how many of a rank's tokens are few."""
    return -(-tokens // SHARES[way])


def width(size: int) -> int:
    """Return how many numbers a rank has of each row."""
    return sum(map(math.prod, _shapes(size)))


def way_of(numbers: np.ndarray, size: int) -> int:
    """Return the way that serves all rows of a table, (..., size * :func:`width`)."""
    return int(numbers.reshape(-1, width(size))[:, 0].max(initial=OWN))


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
    held = [_pieces(*rank) for rank in zip(positions, ids, strict=True)]
    own = [_sequences(of_rank) for of_rank in held]
    serves = all(
        max(len(x), len(y)) <= MOST and _ascend(x)
        for x, y in zip(held, own, strict=True)
    )
    # What rank i sees of rank j.
    seen: list[list[list]] = [[[] for _ in range(size)] for _ in range(size)]
    holders = collections.defaultdict(list)
    for rank, of_rank in enumerate(held):
        for document in {x.document for x in of_rank if x.document >= 0}:
            holders[document].append(rank)
    for document, ranks in sorted(holders.items()):
        pieces = {r: [x for x in held[r] if x.document == document] for r in ranks}
        for rank, other in itertools.permutations(ranks, 2):
            found, is_all = _seen(pieces[rank], pieces[other])
            serves &= is_all
            if found is not None:
                seen[rank][other].append(found)
    firsts, ends = _ends(seen, tokens)
    by_measure = {
        way: _few_of(seen, firsts, ends, tokens, few(tokens, way)) if serves else None
        for way in SHARES
    }
    way = ALL if serves else NONE
    for measure in reversed(SHARES):
        if by_measure[measure] is None:
            break
        way = measure if ends.any() else OWN
    nothing = tokens, tokens, PADDING
    every = [_padded([x[:3] for x in of], nothing, MOST) for of in held]
    numbers = []
    for rank in range(size):
        of_measures = (_of_measure(x, rank, size) for x in by_measure.values())
        at, calls = zip(*of_measures, strict=True)
        others = [
            _padded(seen[rank][rank - distance], (tokens,) * 4, MOST + 1)
            for distance in range(1, size)
        ]
        own_starts = _padded(own[rank], (tokens,) * 2, MOST + 1)
        parts = (way, at, own_starts, calls, others, every)
        numbers += [np.array(x).reshape(-1) for x in parts]
    return np.concatenate(numbers)


def _ends(seen: list[list[list]], tokens: int) -> np.ndarray:
    """Return where what is seen begins and ends, int (2, 2, ranks).

    Of the queries of each rank that see keys of others, and of its keys that others
    see. Where there are none, it ends at 0.
    """
    found = np.full((2, 2, len(seen)), tokens)
    found[1] = 0
    for rank, other in itertools.permutations(range(len(seen)), 2):
        for first, end, key, key_end in seen[rank][other]:
            for of, whose, *ends in ((0, rank, first, end), (1, other, key, key_end)):
                found[0, of, whose] = min(found[0, of, whose], ends[0])
                found[1, of, whose] = max(found[1, of, whose], ends[1])
    return found


def _few_of(seen: list[list[list]], firsts, ends, tokens: int, count: int):
    """Return what the one call is, by a measure of what is few; None if it is more.

    Returns:
      int (2, ranks), where the few queries and the few keys of each begin; and of each
      rank the starts of the sequences, with the end.
    """
    size = len(seen)
    if (ends - firsts).max() > count:
        return None
    at = np.clip(firsts, 0, tokens - count)
    calls = [_call_of(rank, seen[rank], at, count) for rank in range(size)]
    return (at, calls) if max(map(len, calls)) <= _calls(size) + 1 else None


def _of_measure(found, rank: int, size: int):
    """Return the numbers of a rank: (1 + ranks,), and (2, sequences + 1)."""
    if found is None:
        return np.zeros(1 + size, int), np.zeros((2, _calls(size) + 1), int)
    (queries, keys), calls = found
    starts = calls[rank]
    return np.append(queries[rank], keys), _padded(starts, starts[-1], _calls(size) + 1)


def _call_of(rank: int, seen: list[list], at, count: int) -> list[tuple[int, int]]:
    """Return where the sequences of the one call begin.

    Queries are those few of the rank, once for each other rank. Keys are the few of
    all ranks. Sequences leave nothing out: between what is seen they have queries that
    see nothing, or keys that are not seen.
    """
    size, found, before = len(seen), [], (0, 0)
    for copy, other in enumerate(x for x in range(size) if x != rank):
        query_at = copy * count - at[0, rank]
        key_at = other * count - at[1, other]
        for first, end, key, key_end in seen[other]:
            begin = first + query_at, key + key_at
            found += _between(before, begin)
            found.append(begin)
            before = end + query_at, key_end + key_at
    end = (size - 1) * count, size * count
    return [*found, *_between(before, end), end]


def _between(before: tuple[int, int], begin: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the sequences of queries without keys, and of keys without queries."""
    found = []
    if before[0] < begin[0]:
        found.append(before)
    if before[1] < begin[1]:
        found.append((begin[0], before[1]))
    return found


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
