"""Where the sequences begin that the packed kernel is given for a run of queries."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.attention.kernels.flash.pieces import Pieces, Starts, joined, places
from jaxcomm.attention.kernels.kernel import Hop
from jaxcomm.attention.mask import Mask
from jaxcomm.attention.pairs import Run


def of_own(pieces: Pieces, tokens: int) -> Starts:
    """Return the starts where the keys are those of the queries, of documents.

    A sequence is a document. Before it comes one of keys that no query sees. Padding
    has no keys. So the kernel writes all results.

    Args:
      tokens: how many there are, in all rows.
    """
    end = pieces.document_ends(tokens)
    begin = jnp.where(pieces.begins, pieces.start, end)
    key = jnp.where(pieces.document < 0, end, begin)
    return of_documents(begin, key, end, tokens, tokens)


def of_run(hop: Hop, run: Run) -> Starts:
    """Return the starts of a run without documents."""
    if run.are == "behind":
        return of_border(hop.query.shape[0], run, run.keys[1] - run.keys[0])
    return Among(hop, run).starts(hop.query.shape[0])


def of_blocks(hop: Hop, run: Run) -> Starts:
    """Return the starts where a rank sees one of some blocks.

    A row's sequences are the block; and queries and keys before it and behind it, which
    see nothing and are not seen.

    Args:
      run: all queries and all keys.
    """
    ends = run.queries[1], run.keys[1]

    def corners(block):
        (first, end), (key, key_end) = block.queries, block.keys
        return (0, 0), (first, 0), (first, key), (end, key_end), (ends[0], key_end)

    at = np.array([corners(block) for block in hop.pairs.blocks], np.int32)
    # Of no block there is anything between two corners at one place.
    behind = np.append(at[:, 1:], np.broadcast_to(ends, at[:, :1].shape), 1)
    at = at[:, (at != behind).any((0, 2))]
    which = hop.pairs.block
    at = jnp.asarray(at[0]) if which is None else jnp.asarray(at)[which]
    rows = np.arange(hop.query.shape[0], dtype=np.int32)[:, None, None]
    at = (at + rows * np.array(ends, np.int32)).reshape(-1, 2)
    last = hop.query.shape[0] * np.array([ends], np.int32)
    return Starts(*jnp.append(at, last, 0).T)


def of_border(batch: int, run: Run, seen) -> Starts:
    """Return the starts of queries and the border before them, in a window.

    A sequence has all queries, and the last keys of the border: those of the first
    query's document. Other queries are computed too, and what they see is dropped.

    Args:
      seen: how many keys that document has, int32 (B,) or one for all.
    """
    queries, keys = run.queries[1] - run.queries[0], run.keys[1] - run.keys[0]
    row = jnp.arange(batch, dtype=jnp.int32)
    each = [(row * queries, row * keys), (row * queries, row * keys + keys - seen)]
    return joined(each, [(batch * queries, batch * keys)])


def border_of(queries: Pieces, keys: Pieces, batch: int, tokens: int, border: int):
    """Return how many keys of a border the first document of each row has.

    Args:
      queries, keys: pieces that are right, of a rank and of the one before it.
      tokens: of a row.
      border: how many keys of a row are given.

    Returns:
      int32 (B,); and whether no other query sees a key of the border.
    """
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]

    def bounds(pieces):
        """Return the first and the last piece of each row, as bool (B, most)."""
        is_here = (pieces.row == row) & (pieces.start < batch * tokens)
        number = jax.lax.iota(jnp.int32, len(pieces.start))
        first = jnp.where(is_here, number, len(number)).min(1, keepdims=True)
        last = jnp.where(is_here, number, -1).max(1, keepdims=True)
        return is_here, is_here & (number == first), is_here & (number == last)

    here, is_first, _ = bounds(queries)
    there, _, is_last = bounds(keys)
    first = jnp.where(is_first, queries.document, -1).max(1)
    last = jnp.where(is_last, keys.document, -1).max(1)
    is_same = (first == last) & (first >= 0)
    begin = jnp.where(
        there & (keys.document == last[:, None]), keys.start, batch * tokens
    )
    seen = jnp.minimum((row[:, 0] + 1) * tokens - begin.min(1), border)
    # Numbers ascend in both.
    largest = jnp.iinfo(jnp.int32).max
    known = here & (queries.document >= 0)
    least = jnp.where(known, queries.document, largest).min(1)
    most = jnp.where(there, keys.document, -1).max(1)
    is_right = (least > most) | ((least == most) & is_same) | (most < 0)
    return jnp.where(is_same, seen, 0), is_right.all()


class Among:
    """Of queries that are the keys, or among them.

    A sequence is a document: its queries in the run, and its keys up to the last that
    they see. Before it comes one of keys that no query sees. Padding has no keys. So
    the kernel writes all results.
    """

    def __init__(self, hop: Hop, run: Run):
        pairs = hop.pairs
        self.mask: Mask = pairs.mask
        self.batch = hop.query.shape[0]
        self.queries = run.queries[1] - run.queries[0]
        self.keys = run.keys[1] - run.keys[0]
        # The number of the first query's own key, and of the first key that is one.
        self._own: Any = 0
        self._first: Any = 0
        if run.are == "among":
            at = pairs.keys.positions[run.keys[1] - 1] - (self.keys - 1)
            self._own = pairs.queries.positions[run.queries[0]] - at
            self._first = jnp.maximum(-at, 0)
        self.ids: Any = None
        self.key_ids: Any = None
        if pairs.queries.segment_ids is not None:
            self.ids = pairs.queries.segment_ids[:, slice(*run.queries)]
            key_ids = pairs.keys.segment_ids[:, slice(*run.keys)]
            is_key = jax.lax.iota(jnp.int32, self.keys) >= self._first
            self.key_ids = jnp.where(is_key, key_ids, -1)

    def are_right(self, most: int):
        """Whether documents are one behind the other, ``most`` or less of queries.

        And whether queries have the ids of their keys.
        """
        own = jax.lax.dynamic_slice_in_dim(
            self.key_ids, self._own, self.queries, axis=1
        )
        ids = self.key_ids
        before = jax.lax.cummax(jnp.pad(ids, ((0, 0), (1, 0)), constant_values=-1), 1)
        begins = jnp.pad(
            ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True
        )
        is_known = ~begins | (ids < 0)
        are_behind = (is_known | (ids > before[:, :-1])).all()
        _, count = self._begins(most)
        return are_behind & (own == self.ids).all() & (count <= most)

    def _begins(self, most: int):
        return places(self.ids[:, 1:] != self.ids[:, :-1], most)

    def starts(self, most: int) -> Starts:
        """Return the starts; of ``most`` documents or less, which are right."""
        batch, queries, keys = self.batch, self.queries, self.keys
        first, end = self._ends()
        if self.ids is None:
            begin = jnp.arange(batch + 1, dtype=jnp.int32) * queries
        else:
            begin, _ = self._begins(most)
        begin, behind = begin[:-1], begin[1:]
        row = jnp.minimum(begin // queries, batch - 1)
        at, last = begin - row * queries, behind - row * queries
        key = jnp.where(at == 0, first[row], self._own + at)
        key_end = jnp.where(last == queries, end[row], self._own + last)
        is_padding = begin >= batch * queries
        if self.ids is not None:
            is_padding |= self.ids[row, jnp.minimum(at, queries - 1)] < 0
        is_document = begin < batch * queries
        key = jnp.where(is_document, row * keys + key, batch * keys)
        key_end = jnp.where(is_document, row * keys + key_end, batch * keys)
        # Padding sees nothing.
        key = jnp.where(is_padding, key_end, key)
        return of_documents(begin, key, key_end, batch * queries, batch * keys)

    def _ends(self):
        """Return where a row's keys begin and end, int32 (B,) each."""
        number = jax.lax.iota(jnp.int32, self.keys)
        last = self._own + self.queries
        first, end = self._first, last
        if self.mask.right is None:
            end = self.keys
        if self.ids is not None:
            is_other = self.key_ids != self.ids[:, :1]
            before = jnp.where(is_other & (number < self._own), number + 1, 0).max(1)
            first = jnp.maximum(first, before)
            if self.mask.right is None:
                is_other = self.key_ids != self.ids[:, -1:]
                behind = is_other & (number >= last)
                end = jnp.where(behind, number, self.keys).min(1)
        if self.mask.left is not None:
            first = jnp.maximum(first, self._own - self.mask.left)
        return [jnp.broadcast_to(jnp.int32(x), (self.batch,)) for x in (first, end)]


def of_documents(begin, key, key_end, queries: int, keys: int) -> Starts:
    """Return the starts of documents, by their first query and by their keys.

    Args:
      begin, key, key_end: int32 (documents,). Padding has no keys.
      queries, keys: how many there are, in all rows.
    """
    before = jnp.pad(key_end, (1, 0))[:-1]
    return joined(
        [(begin, before), (begin, key)],
        [(queries, key_end[-1]), (queries, keys)],
    )
