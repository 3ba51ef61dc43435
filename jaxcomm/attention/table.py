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
# The few tokens of a rank may be so many parts of its tokens.
_PARTS = 32
# With more ranks a row of the table is longer than its tokens.
_MOST_RANKS = 16


class Table(NamedTuple):
    """What a causal mask within documents lets one rank see, of each row.

    int32 (B, ...). A piece is tokens of one document whose positions leave none out.
    Places are numbers of tokens in a row. What is not there is behind all tokens.

    Attributes:
      way: OWN, FEWEST, FEW, ALL or NONE. The same on all ranks. NONE where documents do
        not ascend, or a rank has more than ``MOST`` of them.
      at: (measures, 2, 2, some): by each of ``SHARES`` the few queries of this rank,
        and its few keys, as parts: which of the few each begins with, and which token
        that is. Nothing where the way is a later one.
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
    few = (len(SHARES), 2, 2, _PARTS), (len(SHARES), 2, _calls(size) + 1)
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


def copies(way: int, size: int) -> int:
    """Return how often the few queries are in the one call.

    By the least measure a query sees keys of one other rank.
    """
    return 1 if way == FEWEST else size - 1


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
    needed = _needed(seen, tokens)
    by_measure = {
        way: _few_of(seen, needed, few(tokens, way), copies(way, size))
        if serves
        else None
        for way in SHARES
    }
    way = ALL if serves else NONE
    for measure in reversed(SHARES):
        if by_measure[measure] is None:
            break
        way = measure if needed.any() else OWN
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


def _needed(seen: list[list[list]], tokens: int) -> np.ndarray:
    """Return which queries of each rank see keys of others, and which keys are seen.

    Returns:
      bool (2, ranks, tokens).
    """
    found = np.zeros((2, len(seen), tokens), bool)
    for rank, other in itertools.permutations(range(len(seen)), 2):
        for first, end, key, key_end in seen[rank][other]:
            found[0, rank, first:end] = True
            found[1, other, key:key_end] = True
    return found


def _few_of(seen: list[list[list]], needed: np.ndarray, count: int, copies: int):
    """Return what the one call is, if so many tokens are few; None if more are needed.

    Returns:
      For each rank its parts, (2, 2, parts), as in :class:`Table`; and the starts of
      the sequences, with the end.
    """
    size, tokens = len(seen), needed.shape[2]
    queries = [_runs(x) for x in needed[0]]
    if copies == 1:
        queries = [[x[:2] for other in of_rank for x in other] for of_rank in seen]
    total = max(sum(end - first for first, end in each) for each in queries)
    # Where there is one copy, each query sees keys of one rank.
    is_once = copies > 1 or [sum(e - f for f, e in x) for x in queries] == [
        int(x.sum()) for x in needed[0]
    ]
    if max(total, needed[1].sum(1).max()) > count or not is_once:
        return None
    numbers, parts = zip(
        *(_picked(each, tokens, count) for each in queries),
        *(_picked(_runs(each), tokens, count) for each in needed[1]),
        strict=True,
    )
    calls = [
        _call_of(rank, seen[rank], numbers[rank], numbers[size:], count, copies)
        for rank in range(size)
    ]
    if max(map(len, parts)) > _PARTS or max(map(len, calls)) > _calls(size) + 1:
        return None
    return list(zip(parts[:size], parts[size:], strict=True)), calls


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


def _of_measure(found, rank: int, size: int):
    """Return the numbers of a rank: (2, 2, parts), and (2, sequences + 1)."""
    if found is None:
        return np.zeros((2, 2, _PARTS), int), np.zeros((2, _calls(size) + 1), int)
    parts, starts = (x[rank] for x in found)
    behind = np.iinfo(np.int32).max, 0
    parts = [_padded(x, behind, _PARTS) for x in parts]
    return np.stack(parts), _padded(starts, starts[-1], _calls(size) + 1)


def _call_of(
    rank: int, seen: list[list], numbers, key_numbers, count: int, copies: int
) -> list[tuple[int, int]]:
    """Return where the sequences of the one call begin.

    Queries are those few of the rank, once or once for each other rank. Keys are the
    few of all ranks. Sequences leave nothing out: between what is seen they have
    queries that see nothing, or keys that are not seen.

    Args:
      numbers: of the queries among the few, (tokens,).
      key_numbers: the same of each rank's keys.
    """
    size, found, before = len(seen), [], (0, 0)
    for copy, other in enumerate(x for x in range(size) if x != rank):
        for first, end, key, key_end in seen[other]:
            query = (copy % copies) * count + int(numbers[first])
            begin = query, other * count + int(key_numbers[other][key])
            found += _between(before, begin)
            found.append(begin)
            before = begin[0] + end - first, begin[1] + key_end - key
    end = copies * count, size * count
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
