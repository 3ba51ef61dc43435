"""What ranks see of each other's documents, computed where tokens are dealt.

On a GPU it would cost some forty small kernels and two collectives in each layer.
"""

import collections
import math
from typing import Any, NamedTuple

import numpy as np

from jaxcomm.attention.mask import PADDING

# Pieces that a rank may have in a row. A kernel looks at as many sequences as it is
# told: backward 64 cost 1.07 times as much as the exact number did (24 documents in
# 32,768 tokens, one H100).
MOST = 64
# Of a ring: no rank sees another's keys; few tokens do, or are seen; any may. Or the
# table serves none of these.
OWN, SOME, ALL, NONE = range(4)
# The part of the tokens that are few.
_SHARE = 4
# With more ranks a row of the table is longer than its tokens.
_MOST_RANKS = 16


class Table(NamedTuple):
    """What a causal mask within documents lets one rank see, of each row.

    int32 (B, ...). A piece is tokens of one document whose positions leave none out.
    Places are numbers of tokens in a row. What is not there is behind all tokens.

    Attributes:
      way: OWN, SOME or ALL; NONE where documents do not ascend, or a rank has more
        than ``MOST`` pieces. The same on all ranks.
      bounds: (4, ranks): of each rank the first and the end of its queries that see
        keys of others; and of its keys that others see.
      own: (3, MOST): of each document the first token, the first key, and the end.
        Padding has no keys.
      seen: (ranks - 1, 4, MOST + 1): of the keys of the rank so far before, the queries
        and the keys that all of them see: first and end of both.
      every: (ranks, 3, MOST): first token, end and document of the pieces of each rank.
    """

    way: Any
    bounds: Any
    own: Any
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
    several = (size - 1, 4, MOST + 1), (size, 3, MOST)
    return (), (4, size), (3, MOST), *several


def few(tokens: int) -> int:
    """Return how many of a rank's tokens are few."""
    return -(-tokens // _SHARE)


def width(size: int) -> int:
    """Return how many numbers a rank has of each row."""
    return sum(map(math.prod, _shapes(size)))


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
    serves = all(len(x) <= MOST and _ascend(x) for x in held)
    bounds = np.array([[tokens], [0], [tokens], [0]]).repeat(size, 1)
    seen: list[list] = [[[] for _ in range(size - 1)] for _ in range(size)]
    holders = collections.defaultdict(list)
    for rank, of_rank in enumerate(held):
        for document in {x.document for x in of_rank if x.document >= 0}:
            holders[document].append(rank)
    for document, ranks in sorted(holders.items()):
        pieces = {r: [x for x in held[r] if x.document == document] for r in ranks}
        for rank in ranks:
            for other in ranks:
                if rank == other:
                    continue
                found, is_all = _seen(pieces[rank], pieces[other])
                serves &= is_all
                if found is None:
                    continue
                seen[rank][(rank - other) % size - 1].append(found)
                for of, row, parts in ((rank, 0, found[:2]), (other, 2, found[2:])):
                    bounds[row, of] = min(bounds[row, of], parts[0])
                    bounds[row + 1, of] = max(bounds[row + 1, of], parts[1])
    way = NONE
    if serves:
        first, end, key, key_end = bounds
        is_few = max((end - first).max(), (key_end - key).max()) <= few(tokens)
        way = SOME if is_few else ALL
        way = way if end.any() else OWN
    every = [_padded([x[:3] for x in of], (tokens, tokens, PADDING)) for of in held]
    numbers = []
    for rank in range(size):
        own = _padded(_documents(held[rank]), (tokens,) * 3)
        others = [_padded(x, (tokens,) * 4, 1) for x in seen[rank]]
        parts = np.array(way), bounds, own, np.stack(others), np.stack(every)
        numbers += [x.reshape(-1) for x in parts]
    return np.concatenate(numbers)


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


def _documents(pieces: list[_Piece]) -> list[tuple[int, int, int]]:
    """Return the first token, first key and end of each document."""
    found: list[tuple[int, int, int]] = []
    last = None
    for piece in pieces:
        if piece.document == last and piece.document >= 0:
            found[-1] = (*found[-1][:2], piece.end)
        else:
            key = piece.start if piece.document >= 0 else piece.end
            found.append((piece.start, key, piece.end))
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


def _padded(rows: list, padding: tuple, more: int = 0) -> np.ndarray:
    """Return (numbers of a row, MOST + more): the last rows are padding."""
    count = MOST + more
    rows = [*rows[:count], *[padding] * (count - len(rows))]
    return np.array(rows).T
