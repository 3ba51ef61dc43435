"""The documents of a rank as a small table, and where packed sequences begin in it.

All of it is small: a GPU's host waits for it, to choose a program.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm.attention.mask import PADDING, Coordinates, Mask


class Starts(NamedTuple):
    """Where packed sequences begin: int32 (sequences + 1,), the end behind the last.

    Queries and keys are packed: those of row 0, then those of row 1, and so on.
    """

    queries: Any
    keys: Any


class Pieces(NamedTuple):
    """Tokens of one document whose positions leave none out, in a rank's order.

    int32 (most,) each. Those behind the last begin and end behind all tokens.

    Attributes:
      start, end: which tokens, of all rows one behind the other.
      row: of the batch.
      document: their segment id, negative for padding.
      first: the position of the first token.
    """

    start: Any
    end: Any
    row: Any
    document: Any
    first: Any

    @classmethod
    def of(cls, tokens: Coordinates, most: int) -> tuple["Pieces", Any]:
        """Return the pieces of a rank's tokens, and whether they are right.

        They are if there are no more than ``most``, and the numbers of documents and
        the positions in each ascend. Padding may be anywhere but in a document.
        """
        ids = tokens.segment_ids
        batch, count = ids.shape
        at = jnp.broadcast_to(tokens.positions, ids.shape)
        jumps = (at[:, 1:] != at[:, :-1] + 1) & (ids[:, 1:] >= 0)
        start, total = places((ids[:, 1:] != ids[:, :-1]) | jumps, most)
        start, end = start[:-1], start[1:]
        inside = jnp.minimum(start, ids.size - 1)
        document = jnp.where(start < ids.size, ids.reshape(-1)[inside], PADDING)
        row = jnp.minimum(start // count, batch - 1)
        found = cls(start, end, row, document, at.reshape(-1)[inside])
        return found, (total <= most) & found._ascend()

    def _ascend(self):
        """Return whether documents and their positions ascend in each row."""
        number = jax.lax.iota(jnp.int32, len(self.start))
        known = self.document >= 0
        before = (number[:, None] > number) & (self.row[:, None] == self.row) & known
        later, earlier = self.document[:, None], self.document
        is_same = later == earlier
        is_next = number[:, None] == number + 1
        is_right = (later > earlier) | (is_same & (self.first[:, None] > self.first))
        # Of one document nothing lies between.
        has_same, has_neighbour = (
            (before & is_same & x).any(1) for x in (True, is_next)
        )
        is_right = (is_right | ~before).all(1) & (has_neighbour | ~has_same)
        return (is_right | ~known).all()

    @property
    def begins(self):
        """Which pieces are the first of a document in their row, bool (most,)."""
        differs = self.document[1:] != self.document[:-1]
        differs |= self.row[1:] != self.row[:-1]
        return jnp.pad(differs, (1, 0), constant_values=True)

    def document_ends(self, tokens: int):
        """Return where the document of each piece ends."""
        begin = jnp.where(self.begins, self.start, tokens)
        following = jax.lax.cummin(begin, reverse=True)
        return jnp.pad(following[1:], (0, 1), constant_values=tokens)

    def segment_ids(self, batch: int, tokens: int):
        """Return the documents of a rank's tokens, int32 (B, T)."""
        documents = jnp.where(self._of(batch * tokens), self.document - PADDING, 0)
        return (documents.sum(1) + PADDING).reshape(batch, tokens)

    def are_of(self, segment_ids):
        """Return whether tokens, int32 (B, T), are of the documents of the pieces."""
        differs = segment_ids.reshape(-1, 1) != self.document
        return ~(self._of(segment_ids.size) & differs).any()

    def _of(self, tokens: int):
        """Return which tokens each piece has, bool (tokens, most)."""
        place = jax.lax.iota(jnp.int32, tokens)[:, None]
        return (self.start <= place) & (place < self.end)


def places(differs, most: int):
    """Return where something begins in rows of tokens.

    Args:
      differs: bool (B, T - 1), whether a token is of something else than that before.
      most: how many there may be.

    Returns:
      int32 (most + 1,), the first token of each, the number of tokens behind the last;
      and how many there are.
    """
    is_first = jnp.pad(differs, ((0, 0), (1, 0)), constant_values=True)
    number = jnp.cumsum(is_first.reshape(-1), dtype=jnp.int32)
    every = jax.lax.iota(jnp.int32, most + 1)
    return (number <= every[:, None]).sum(1, dtype=jnp.int32), number[-1]


class Seen(NamedTuple):
    """What the pieces of a rank's queries see of another rank's keys.

    int32 (most,) each, all of them ascending. Of a piece that sees nothing queries and
    keys are empty.

    Attributes:
      first, end: the queries.
      key, key_end: the keys, all of which these queries see.
    """

    first: Any
    end: Any
    key: Any
    key_end: Any

    @classmethod
    def of(cls, queries: Pieces, keys: Pieces, *, mask: Mask, batch: int, tokens: int):
        """Return it, and whether it is all that is seen.

        It is not where queries of one document see different keys.

        Args:
          queries, keys: pieces that are right, of a rank and of another.
          mask: causal, or none.
          batch, tokens: rows, and how many tokens each has.
        """
        is_seen = queries.document[:, None] == keys.document
        is_seen &= (queries.row[:, None] == keys.row) & (keys.document >= 0)
        if mask.right is not None:
            is_seen &= keys.first < queries.first[:, None]
        key = jnp.where(is_seen, keys.start, jnp.iinfo(jnp.int32).max).min(1)
        key_end = jnp.where(is_seen, keys.end, 0).max(1)
        sees = key_end > 0
        # The piece before, if it is of the document.
        before, end_before = jnp.pad(sees, (1, 0))[:-1], jnp.pad(key_end, (1, 0))[:-1]
        goes_on = sees & before & ~queries.begins
        is_all = (~goes_on | (key_end == end_before)).all()
        is_first = sees & ~goes_on
        ends = queries.document_ends(batch * tokens)
        end = jax.lax.cummax(jnp.where(is_first, ends, queries.end))
        first = jnp.where(is_first, queries.start, end)
        row_begins = queries.row * tokens
        key_end = jax.lax.cummax(jnp.where(is_first, key_end, row_begins))
        key = jnp.where(is_first, key, key_end)
        return cls(first, end, key, key_end), is_all

    def starts(self, queries: int, keys: int) -> Starts:
        """Return the starts of sequences: what is seen, and between that the rest.

        Args:
          queries, keys: how many there are, in all rows.
        """
        before, key_before = (jnp.pad(x, (1, 0))[:-1] for x in (self.end, self.key_end))
        end, key_end = self.end[-1], self.key_end[-1]
        return joined(
            [(before, key_before), (before, self.key), (self.first, self.key)],
            [(end, key_end), (end, keys), (queries, keys)],
        )


def joined(each, ends) -> Starts:
    """Return the starts of sequences.

    Args:
      each: for each sequence of a piece the first query and the first key, of all
        pieces.
      ends: the same of the sequences behind the last piece, and the end.
    """
    found = []
    for of_each, of_ends in zip(
        zip(*each, strict=True), zip(*ends, strict=True), strict=True
    ):
        last = jnp.stack([jnp.int32(x) for x in of_ends])
        found.append(jnp.append(jnp.stack(of_each, 1).reshape(-1), last))
    return Starts(*found)
