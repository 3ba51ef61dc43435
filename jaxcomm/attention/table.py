"""What ranks see of each other's documents, in numbers that go with the tokens."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxcomm.attention.mask import PADDING

# Of a ring: no rank sees another's keys; few tokens do, or are seen, by one of two
# measures; many, which are computed in one call, too; or any. Or the table serves none.
OWN, FEWEST, FEW, MANY, ALL, NONE = range(6)
# The part of the tokens that are few.
SHARES = {FEWEST: 8, FEW: 4, MANY: 1}
# The sequences of the one call. The kernel takes 128 rows more for each.
_CALLS = {FEWEST: 16, FEW: 32, MANY: 64}
# The parts of the keys that are listed for them, for each rank. A piece may see some of
# every other one's.
_LISTED = {FEWEST: 8, FEW: 16, MANY: 48}
# The few tokens of a rank may be so many parts of its tokens.
_PARTS = 32
# Documents of a rank that are some.
_SOME = 16


class Few(NamedTuple):
    """The one call for few tokens, by one measure: int32 (B, ...).

    Parts are two numbers each: a place among the few, and what is there, as is behind
    it up to the next. There is nothing where the way is a later one.

    Attributes:
      queries: (2, parts): the queries of this rank that see keys of others. Where the
        few are all, they are in their places.
      keys: (2, parts): the keys of this rank that others see.
      listed: (2, parts): for each sequence the keys that it sees, of the few of all
        ranks, one behind the other. None is there more than twice. What follows is
        behind all keys.
      starts: (2, sequences + 1): the first query and the first of the listed keys of
        each sequence, and the end.
    """

    queries: Any
    keys: Any
    listed: Any
    starts: Any


class Table(NamedTuple):
    """What a causal mask within documents lets one rank see, of each row.

    int32 (B, ...). A piece is tokens of one document whose positions leave none out.
    Places are numbers of tokens in a row. What is not there is behind all tokens.

    Attributes:
      way: OWN, FEWEST, FEW, MANY, ALL or NONE. The same on all ranks. NONE where
        documents do not ascend, a rank has more than :func:`most` of them, or pieces of
        one on a rank see different keys of another.
      own: (2, most + 1): where sequences of the own tokens begin, and where the last
        ends: the first query and the first key of each.
      few: a :class:`Few` for each of ``SHARES``.
      seen: (ranks - 1, 4, most + 1): of the keys of the rank so far before, the queries
        and the keys that all of them see: first and end of both.
      every: (ranks, 3, most): first token, end and document of the pieces of each rank.
    """

    way: Any
    own: Any
    few: Sequence[Few]
    seen: Any
    every: Any

    @classmethod
    def of(cls, numbers, size: int, tokens: int) -> "Table":
        """Return the parts of int32 (B, :func:`width`)."""
        shapes = _shapes(size, tokens)
        ends = itertools.accumulate(map(math.prod, shapes))
        found, at = [], 0
        for shape, end in zip(shapes, ends, strict=True):
            found.append(numbers[:, at:end].reshape(-1, *shape))
            at = end
        way, own, *of_measures, seen, every = found
        each = [of_measures[i :: len(SHARES)] for i in range(len(SHARES))]
        return cls(way, own, [Few(*x) for x in each], seen, every)


def most(tokens: int) -> int:
    """Return of how many documents a rank's tokens may be, in a row.

    One that is cut has at most as many pieces. A kernel takes 128 rows more for each
    sequence that it is told of: backward 64 cost 1.07 times as much as the exact number
    did (24 documents in 32,768 tokens, one H100).
    """
    return min(512, max(64, tokens // 256))


def _shapes(size: int, tokens: int) -> list[tuple[int, ...]]:
    by_measure = [[(2, n) for n in lengths(way, size)] for way in SHARES]
    few = itertools.chain(*zip(*by_measure, strict=True))
    count = most(tokens)
    return [(), (2, count + 1), *few, (size - 1, 4, count + 1), (size, 3, count)]


def lengths(way: int, size: int) -> tuple[int, int, int, int]:
    """Return how many parts and starts the numbers of a :class:`Few` have room for."""
    return _PARTS, _PARTS, _LISTED[way] * size, _CALLS[way] + 1


def few(tokens: int, way: int = FEW) -> int:
    """Return how many of a rank's tokens are few."""
    return -(-tokens // SHARES[way])


def listed(count: int, size: int) -> int:
    """Return how many keys are listed for the sequences of the one call.

    Of a document in two chunks for each rank, a rank's two see as many keys of others
    as there are. The rest is for tokens of it that a rank has beside them.
    """
    return size * count


def width(size: int, tokens: int) -> int:
    """Return how many numbers a rank of so many tokens has of each row."""
    return sum(map(math.prod, _shapes(size, tokens)))


def way_of(numbers: np.ndarray, size: int) -> int:
    """Return the way that serves all rows of a table, (..., size * :func:`width`)."""
    rows = numbers.reshape(-1, numbers.shape[-1])
    return int(rows[:, :: rows.shape[1] // size].max(initial=OWN))


class Sizes(NamedTuple):
    """What kernels are told of documents, at most: all that may be, or a part.

    Attributes:
      documents: of a rank, in a row.
      longest: tokens of the longest of these.
      keys: of other ranks that one piece sees. All where the way is not ``MANY``.
      are_mixed: whether the numbers of documents do not ascend from rank to rank, or a
        document comes again behind padding.
    """

    documents: int
    longest: int
    keys: int
    are_mixed: bool = True

    @classmethod
    def of(cls, numbers: np.ndarray, size: int, tokens: int) -> "Sizes":
        """Return those of a table.

        There are two answers to each, so that few programs are compiled.

        Args:
          numbers: int32 (..., size * :func:`width`).
          size: number of ranks.
          tokens: how many a rank has in a row.
        """
        table = Table.of(numbers.reshape(-1, width(size, tokens)), size, tokens)
        used = np.flatnonzero((table.own != table.own[:, :, -1:]).any((0, 1)))
        return cls(
            _SOME if used.max(initial=0) < _SOME else most(tokens),
            _fourth(np.diff(table.own).max(), tokens),
            _fourth(np.diff(_calls(table)[:, 1]).max(), size * tokens),
            any(_are_mixed(row, tokens) for row in table.every[::size]),
        )

    def told(self, table: Table, holds, tokens: int) -> Table:
        """Return a table of as many documents as kernels are told; of any if it is not.

        A kernel does not write what it is not told of, and all is to be NaN then.
        """
        starts = table.own[:, :, : self.documents + 1]
        number = np.arange(self.documents + 1, dtype=np.int32)
        equal = np.minimum(number * (tokens // self.documents + 1), tokens)
        equal = np.broadcast_to(equal, starts.shape)
        return table._replace(own=jnp.where(holds, starts, equal))

    def hold(self, table: Table, way: int | None) -> Any:
        """Say whether documents are as few and as short; can be traced."""
        own = table.own
        lengths = own[:, :, 1:] - own[:, :, :-1]
        found = (own[:, :, self.documents] == own[:, :, -1]).all()
        found &= (lengths <= self.longest).all()
        if way == MANY:
            keys = _calls(table)[:, 1]
            found &= (keys[:, 1:] - keys[:, :-1] <= self.keys).all()
        return found


def _calls(table: Table):
    return table.few[MANY - FEWEST].starts


def _are_mixed(every: np.ndarray, tokens: int) -> bool:
    """Say it of the pieces of all ranks, (ranks, 3, most)."""
    document = every[:, 2][every[:, 0] < tokens]
    begins = document[np.diff(document, prepend=PADDING - 1) != 0]
    return bool((np.diff(begins[begins >= 0]) <= 0).any())


def _fourth(number, whole: int) -> int:
    """Return a fourth of the whole if that is enough, else the whole."""
    part = -(-whole // 4)
    return part if number <= part else whole
