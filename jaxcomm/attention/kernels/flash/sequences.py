"""Where the sequences begin that the packed kernel is given for a run of queries."""

import abc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.attention.kernels.flash.library import Starts
from jaxcomm.attention.kernels.kernel import Hop
from jaxcomm.attention.mask import Run

# The number of what is no document, behind all that are.
_PADDING = np.iinfo(np.int32).max


def sequences_of(hop: Hop, run: Run) -> "Sequences":
    """Return the sequences of a run."""
    kinds = {"apart": Apart, "behind": Behind}
    return kinds.get(run.are, Among)(hop, run)


class Sequences(abc.ABC):
    """The documents of one run, in all rows of the batch.

    Queries and keys are packed: those of row 0, then those of row 1, and so on.

    Attributes:
      hop, run: of what.
      batch: rows.
      queries, keys: how many a row has.
      ids, key_ids: int32 (B, queries) and (B, keys), the document of each; or None.
    """

    def __init__(self, hop: Hop, run: Run):
        self.hop, self.run = hop, run
        self.rows, self.columns = slice(*run.queries), slice(*run.keys)
        self.batch = hop.query.shape[0]
        self.queries = run.queries[1] - run.queries[0]
        self.keys = run.keys[1] - run.keys[0]
        self.ids: Any = None
        self.key_ids: Any = None
        if hop.queries.segment_ids is not None:
            self.ids = hop.queries.segment_ids[:, self.rows]
            self.key_ids = hop.keys.segment_ids[:, self.columns]

    @abc.abstractmethod
    def are_right(self) -> Any:
        """Return whether the documents are as the class takes them, traced bool."""

    @abc.abstractmethod
    def starts(self, count: int) -> Starts:
        """Return where the kernel's sequences begin, of ``count`` documents or less."""

    def _starts(self, each, ends) -> Starts:
        """Return the starts of sequences.

        Args:
          each: for each sequence of a document the first query and the first key, of
            all documents.
          ends: the same of the sequences behind the last document, and the end.
        """
        found = []
        for of_each, of_ends in zip(
            zip(*each, strict=True), zip(*ends, strict=True), strict=True
        ):
            ends = jnp.stack([jnp.int32(x) for x in of_ends])
            found.append(jnp.append(jnp.stack(of_each, 1).reshape(-1), ends))
        at, key_at = found
        return Starts(at, key_at, (self.queries, self.keys))

    @property
    def window(self) -> tuple[int, int]:
        """How many keys a query sees to its left and right, in the kernel's words."""
        left, right = self.hop.mask.left, self.hop.mask.right
        return -1 if left is None else left, -1 if right is None else right

    def seen_rows(self, lse, otherwise: float):
        """Return the log-sum-exp, or another number for rows that see nothing."""
        return lse

    def documents(self):
        """Return how many documents there are."""
        return jnp.sum(_begins(self.ids), dtype=jnp.int32)


class Among(Sequences):
    """Of queries that are the keys, or among them.

    A sequence is a document: its queries in the run, and its keys up to the last that
    they see. Before it comes one of keys that no query sees. Padding has no keys. So
    the kernel writes all results.
    """

    def __init__(self, hop, run):
        super().__init__(hop, run)
        # The number of the first query's own key, and of the first key that is one.
        self._own: Any = 0
        self._first: Any = 0
        if run.are == "among":
            at = hop.keys.positions[run.keys[1] - 1] - (self.keys - 1)
            self._own = hop.queries.positions[run.queries[0]] - at
            self._first = jnp.maximum(-at, 0)
        if self.ids is not None:
            is_key = jax.lax.iota(jnp.int32, self.keys) >= self._first
            self.key_ids = jnp.where(is_key, self.key_ids, -1)

    def are_right(self):
        """They are one behind the other, and queries have the ids of their keys."""
        ids = self.key_ids
        if self.run.are == "among":
            ids = jax.lax.dynamic_slice_in_dim(ids, self._own, self.queries, axis=1)
        is_right = (ids == self.ids).all() & _are_one_behind_the_other(self.key_ids)
        if self.run.are == "same":
            is_right &= _ascend(self.hop.queries.positions[..., self.rows], self.ids)
        return is_right

    def starts(self, count):
        batch, queries, keys = self.batch, self.queries, self.keys
        first, end = self._ends()
        if self.ids is None:
            begin = jnp.arange(batch + 1, dtype=jnp.int32) * queries
        else:
            begin = _places(_begins(self.ids), min(count, self.ids.size) + 1)
        begin, behind = begin[:-1], begin[1:]
        is_document = begin < batch * queries
        row = jnp.minimum(begin // queries, batch - 1)
        at, last = begin - row * queries, behind - row * queries
        key = jnp.where(at == 0, first[row], self._own + at)
        key_end = jnp.where(last == queries, end[row], self._own + last)
        if self.ids is not None:
            # Padding sees nothing.
            is_padding = self.ids[row, jnp.minimum(at, queries - 1)] < 0
            key = jnp.where(is_padding, key_end, key)
        key = jnp.where(is_document, row * keys + key, batch * keys)
        key_end = jnp.where(is_document, row * keys + key_end, batch * keys)
        each = [(begin, jnp.pad(key_end, (1, 0))[:-1]), (begin, key)]
        ends = [(behind[-1], key_end[-1]), (behind[-1], batch * keys)]
        return self._starts(each, ends)

    def _ends(self):
        """Return where a row's keys begin and end, int32 (B,) each."""
        mask, number = self.hop.mask, jax.lax.iota(jnp.int32, self.keys)
        last = self._own + self.queries
        first, end = self._first, last
        if mask.right is None:
            end = self.keys
        if self.ids is not None:
            is_other = self.key_ids != self.ids[:, :1]
            before = jnp.where(is_other & (number < self._own), number + 1, 0).max(1)
            first = jnp.maximum(first, before)
            if mask.right is None:
                is_other = self.key_ids != self.ids[:, -1:]
                behind = is_other & (number >= last)
                end = jnp.where(behind, number, self.keys).min(1)
        if mask.left is not None:
            first = jnp.maximum(first, self._own - mask.left)
        return [jnp.broadcast_to(jnp.int32(x), (self.batch,)) for x in (first, end)]


class Apart(Sequences):
    """Of the keys of another rank.

    A sequence is what two ranks have of a document: its queries from the first that
    sees a key, and the keys up to the last that is seen. Every such query sees every
    such key. Before it come a sequence without queries and one without keys.
    """

    def __init__(self, hop, run):
        super().__init__(hop, run)
        # Behind the documents of keys, so that keys remain in order; and no key has it.
        self.ids = jnp.where(self.ids < 0, _PADDING - 1, self.ids)
        self.key_ids = jnp.where(self.key_ids < 0, _PADDING, self.key_ids)

    @property
    def window(self):
        """Every query sees every key."""
        return -1, -1

    def are_right(self):
        """Their numbers and positions ascend, and each is one rectangle."""
        hop = self.hop
        at, key_at = hop.queries.positions, hop.keys.positions
        is_right = (self.key_ids[:, 1:] >= self.key_ids[:, :-1]).all()
        is_right &= (self.ids[:, 1:] >= self.ids[:, :-1]).all()
        # A document of such a number would be taken for padding.
        is_right &= (self.hop.queries.segment_ids < _PADDING - 1).all()
        is_right &= _ascend(at, self.ids) & _ascend(key_at, self.key_ids)
        if hop.mask.right is None:
            return is_right
        *_, is_rectangle = self._rectangles(MOST_DOCUMENTS[-1])
        return is_right & is_rectangle.all()

    def starts(self, count):
        first, end, key, key_end, _ = self._rectangles(count)
        before, key_before = (jnp.pad(x, (1, 0))[:-1] for x in (end, key_end))
        each = [(before, key_before), (before, key), (first, key)]
        queries, keys = self.batch * self.queries, self.batch * self.keys
        ends = [(end[-1], key_end[-1]), (end[-1], keys), (queries, keys)]
        return self._starts(each, ends)

    def _rectangles(self, count: int):
        """Return what two ranks have of each document.

        Returns:
          (first, end, key, key_end, is_rectangle): (count,) each. The queries and keys
          of each, packed; both empty where no query sees a key. And whether every query
          sees every key.
        """
        hop, queries, keys = self.hop, self.queries, self.keys
        count = min(count, self.ids.size)
        begin = _places(_begins(self.ids), count + 1)
        begin, end = begin[:-1], begin[1:]
        is_document = begin < self.ids.size
        row = jnp.minimum(begin // queries, self.batch - 1)
        first, last = begin - row * queries, end - row * queries - 1
        document = self.ids[row, jnp.minimum(first, queries - 1)][:, None]
        key_ids = self.key_ids[row]
        key = (key_ids < document).sum(1, dtype=jnp.int32)
        key_end = (key_ids <= document).sum(1, dtype=jnp.int32)
        is_rectangle = jnp.ones_like(is_document)
        if hop.mask.right is not None:
            at = jnp.atleast_2d(hop.queries.positions)
            key_at = jnp.atleast_2d(hop.keys.positions)
            row_at = row if len(at) > 1 else jnp.zeros_like(row)
            first_key = key_at[row_at, jnp.minimum(key, keys - 1)]
            last_query = at[row_at, jnp.clip(last, 0, queries - 1)]
            number, key_number = jnp.arange(queries), jnp.arange(keys)
            is_own = (number >= first[:, None]) & (number <= last[:, None])
            is_before = is_own & (at[row_at] < first_key[:, None])
            first = first + is_before.sum(1, dtype=jnp.int32)
            is_key = (key_number >= key[:, None]) & (key_number < key_end[:, None])
            is_before = is_key & (key_at[row_at] < last_query[:, None])
            key_end = key + is_before.sum(1, dtype=jnp.int32)
            first_query = at[row_at, jnp.clip(first, 0, queries - 1)]
            last_key = key_at[row_at, jnp.clip(key_end - 1, 0, keys - 1)]
            is_rectangle = first_query > last_key
        is_seen = is_document & (first <= last) & (key < key_end)
        first = jnp.where(is_seen, row * queries + first, end)
        key = jnp.where(is_document, row * keys + key, self.batch * keys)
        key_end = jnp.where(is_seen, row * keys + key_end, key)
        return first, end, key, key_end, is_rectangle | ~is_seen


class Behind(Sequences):
    """Of queries and the border before them, in a window.

    A sequence has all queries, and the last keys of the border: those of the first
    query's document. Other queries are computed too, and what they see is dropped.
    """

    @property
    def window(self):
        """The last query is as far from the last key as the queries are many."""
        return (self.hop.mask.left or 0) - self.queries, -1

    def are_right(self):
        """No other query and no other key is of the first query's document."""
        ids, first = self.ids, self.ids[:, :1]
        is_same = self.key_ids == first
        is_right = (is_same.sum(1) == self._seen()) | (first[:, 0] < 0)
        is_known = (ids < 0) | (ids == first)
        return (is_known | (ids > self.key_ids.max(1)[:, None])).all() & is_right.all()

    def starts(self, count):
        row = jnp.arange(self.batch, dtype=jnp.int32)
        at, key_at = row * self.queries, row * self.keys
        each = [(at, key_at), (at, key_at + self.keys - self._seen())]
        total = self.batch * self.queries, self.batch * self.keys
        return self._starts(each, [total])

    def seen_rows(self, lse, otherwise):
        if self.ids is None:
            return lse
        is_seen = (self.ids == self.ids[:, :1]) & (self.ids >= 0)
        return jnp.where(is_seen[..., None], lse, otherwise)

    def documents(self):
        return jnp.int32(1)

    def _seen(self):
        """Return how many keys the first query's document has, int32 (B,)."""
        if self.ids is None:
            return jnp.full(self.batch, self.keys, jnp.int32)
        number = jax.lax.iota(jnp.int32, self.keys)
        is_other = (self.key_ids != self.ids[:, :1]) | (self.ids[:, :1] < 0)
        return self.keys - jnp.where(is_other, number + 1, 0).max(1)


# How many documents a batch may have. The kernel looks at as many sequences as it is
# told: backward 64 cost 1.07 and 1,024 cost 1.3 times as much as the exact number did
# (24 documents in 32,768 tokens, one H100).
MOST_DOCUMENTS = 64, 1024


def _begins(ids):
    """Return which tokens are the first of a document, bool (B, T)."""
    differs = ids[:, 1:] != ids[:, :-1]
    return jnp.pad(differs, ((0, 0), (1, 0)), constant_values=True)


def _places(found, size: int):
    """Return where a bool array is true, int32 (size,); then its size."""
    (places,) = jnp.nonzero(found.reshape(-1), size=size, fill_value=found.size)
    return places.astype(jnp.int32)


def _are_one_behind_the_other(ids):
    """Return whether the tokens of each document are neighbours.

    It is enough that documents have ascending numbers. Negative ones are padding.
    """
    before = jax.lax.cummax(jnp.pad(ids, ((0, 0), (1, 0)), constant_values=-1), axis=1)
    is_known = ~_begins(ids) | (ids < 0)
    return (is_known | (ids > before[:, :-1])).all()


def _ascend(positions, ids):
    """Return whether positions ascend in each document."""
    is_inside = ids[:, 1:] == ids[:, :-1]
    return (~is_inside | (positions[..., 1:] > positions[..., :-1])).all()
