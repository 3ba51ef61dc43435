"""A ring of documents by a kernel that takes them packed.

A rank's own keys are one call for all of its documents. Of another rank's keys a query
sees all that are of its document and lie before its piece, or none. Few queries see
any, and few keys are seen: those of the documents that are cut. They alone travel, and
are computed.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.flash import sequences
from jaxcomm.attention.kernels.flash.pieces import Pieces, Seen, Window, bounds
from jaxcomm.attention.kernels.kernel import Grads, Hop, Saved, merge
from jaxcomm.attention.kernels.primitive import hop_backward, hop_forward
from jaxcomm.attention.kernels.selection import unpacked
from jaxcomm.attention.mask import Coordinates, Run
from jaxcomm.attention.permutation import poison_unless
from jaxcomm.attention.strategies.hops import members_at
from jaxcomm.attention.strategies.loop import Loop, completion
from jaxcomm.attention.strategies.strategy import Keys, keep
from jaxcomm.attention.strategies.ways import Found, Pieced, Ways, ways_of
from jaxcomm.attention.table import ALL, NONE, OWN, SOME, Table, few
from jaxcomm.collectives.permute import ring_shift


class _Packed(NamedTuple):
    """What is known of the tokens.

    Attributes:
      own: where the sequences of a rank's own keys begin.
      seen: what its queries see of the other ranks' keys, by distance; or None.
      at: the first of the few queries of this rank that may see any.
      keys_at: int32 (ranks,), the first of the few keys of each that may be seen.
      every: the pieces of all ranks.
      is_right: whether this rank holds what a table says, or None if all know.
      table: what the rest follows from but ``is_right``, in the branch that reads it;
        or None.
    """

    own: Any = None
    seen: Any = None
    at: Any = None
    keys_at: Any = None
    every: Any = None
    is_right: Any = None
    table: Any = None


def packed_ring(ring: Loop) -> "PackedRing | None":
    """Return a ring of documents, or None if no kernel takes them packed."""
    ways = ways_of(ring.call, ring.inputs, 3 if ring.last else 1, *ring.hops)
    return None if ways is None else PackedRing(ring, ways)


class PackedRing:
    """The passes of one call.

    Attributes:
      ring: the hops of the call.
      ways: how they may be computed.
    """

    def __init__(self, ring: Loop, ways: Ways):
        self.ring, self.ways, self.inputs = ring, ways, ring.inputs
        self.shape = self.inputs.query.shape[:2]
        self.key_tokens = self.inputs.key.shape[1]

    def look(self) -> Found:
        """Look at the tokens of all ranks, or at the table that came with them."""
        is_known = self.inputs.table is not None and self.ring.call.mask.is_causal
        return self.ways.look(self._look_up if is_known else self._look)

    def _look_up(self, most: int) -> Found:
        """Look at the table alone. Each rank sees whether it holds what that says."""
        inputs, (batch, tokens) = self.inputs, self.shape
        table = Table.of(inputs.table, self.ring.call.size)
        every = self._every_piece(table)
        own = jax.tree.map(lambda x: x[self.ring.call.rank()], every)
        ids = own.segment_ids(Window(0, tokens, batch, tokens))
        is_right = (ids == inputs.query_ids).all()
        if inputs.is_right is not None:
            is_right &= inputs.is_right
        way = table.way[0] if batch == 1 else self._way(self._bounds(table))
        way = self.ways.found(way, (table.way < NONE).all())
        # Where nothing is sent each rank goes its own way. Else see _own_keys.
        way = self.ways.found(way, True, (way == OWN) & ~is_right)
        packed = _Packed(is_right=is_right, table=inputs.table)
        return Found(way, packed if self.ways.is_whole else self._read(packed))

    def _read(self, of: _Packed) -> _Packed:
        """Return what a table says. It is computed where it is needed: in a branch."""
        if of.table is None:
            return of
        table = Table.of(of.table, self.ring.call.size)
        begin, key, end = (self._in_rows(table.own[:, i], 0) for i in range(3))
        own = sequences.of_documents(begin, key, end, self._tokens, self._tokens)
        first, stop, key_first, key_stop = (
            self._in_rows(table.seen[:, :, i], 1) for i in range(4)
        )
        row = jnp.arange(self.shape[0], dtype=jnp.int32)
        row = jnp.broadcast_to(jnp.repeat(row, first.shape[1] // len(row)), first.shape)
        seen = Seen(first, stop, key_first, key_stop, row)
        places = self._places(self._bounds(table))
        return _Packed(own, seen, *places, self._every_piece(table), of.is_right)

    def _in_rows(self, x, axis: int):
        """Return places in rows, which are dimension 0, one behind the other."""
        row = jnp.arange(len(x), dtype=jnp.int32) * self.shape[1]
        found = jnp.moveaxis(x + row.reshape(-1, *[1] * (x.ndim - 1)), 0, axis)
        return found.reshape(*found.shape[:axis], -1)

    def _every_piece(self, table: Table) -> Pieces:
        start, end = (self._in_rows(table.every[:, :, i], 1) for i in range(2))
        document = jnp.moveaxis(table.every[:, :, 2], 0, 1).reshape(start.shape)
        return Pieces(start, end, start, document, start)

    @staticmethod
    def _bounds(table: Table):
        """Return them over all rows."""
        first, end, key, key_end = (table.bounds[:, i] for i in range(4))
        return first.min(0), end.max(0), key.min(0), key_end.max(0)

    def _way(self, bounds):
        """Return the way of all ranks.

        Args:
          bounds: int32 (ranks,) each: the first and the end of a rank's queries that
            see keys of others, and of the keys that others see, in a row.
        """
        first, end, key, key_end = bounds
        are_few = (end - first <= few(self.shape[1])).all()
        are_few &= (key_end - key <= few(self.key_tokens)).all()
        return jnp.where((end == 0).all(), OWN, jnp.where(are_few, SOME, ALL))

    def _places(self, bounds):
        """Return where the few queries of this rank begin, and the few keys of all."""
        (tokens, keys), rank = (self.shape[1], self.key_tokens), self.ring.call.rank()
        at = jnp.clip(bounds[0][rank], 0, tokens - few(tokens))
        return at, jnp.clip(bounds[2], 0, keys - few(keys))

    def forward(self, found: Found, generic: Callable[[], Any]):
        """Attend.

        Args:
          generic: does so by hops of any documents, and returns (out, lse).

        Returns:
          (out, lse), out in the dtype of the query; and what :meth:`backward` needs.
        """
        out, lse, last = self._take(
            found, self._attend, lambda: (*generic(), self._no_keys())
        )
        return (out, lse), (found, keep(last))

    def backward(self, kept, saved: Saved, generic: Callable[[Keys], Any]):
        """Return gradients of query, key and value in their dtype.

        Args:
          generic: takes the last block, and returns them by hops of any documents.
        """
        found, last = kept
        if not self.ring.own.has_residual:
            # What a way is given is computed, whichever is taken.
            saved = saved._replace(delta=None)
        return self._take(
            found,
            functools.partial(self._differentiate, saved, last),
            lambda: generic(self._last(self.ring.own_block)),
        )

    def _take(self, found: Found, compute, rest):
        if not self.ways.is_whole:
            return compute(found, None, found.of_ways)
        each = [functools.partial(compute, found, way) for way in self._every]
        # Programs of more pieces are rare, and have one way less.
        of_many = [each[0], *each[2:], *each[2:]]
        return self.ways.take(found, each, rest, self._look, of_many)

    @property
    def _every(self):
        return (OWN, SOME, ALL) if self.ring.last else (OWN,)

    def _look(self, most: int) -> Found:
        call, inputs, batch_tokens = self.ring.call, self.inputs, self._tokens
        if not self.ring.last:
            rank = 0 if call.size == 1 else call.rank()
            at = inputs.query_layout.positions_of(rank)
            own, serves = Pieces.of(Coordinates(at, inputs.query_ids), most)
            is_held = inputs.is_right
            way = self.ways.found(OWN, serves, None if is_held is None else ~is_held)
            return Found(way, _Packed(sequences.of_own(own, batch_tokens)))
        pieced = Pieced.of(call, inputs, most)
        size, rank, tokens = call.size, call.rank(), self.shape[1]
        own = pieced.at(rank)
        # All pairs, so that all ranks know what each of them finds.
        every = jnp.arange(size, dtype=jnp.int32)
        others = (every[:, None] - 1 - every[:-1]) % size
        of_pair = functools.partial(
            Seen.of, mask=call.mask, shape=self.shape, key_tokens=self.key_tokens
        )
        of_rank = jax.vmap(of_pair, (None, 0))
        seen, are_all = jax.vmap(of_rank)(pieced.every, pieced.at(others))

        def parts(first, end, row, tokens):
            """Return where the parts of each pair begin and end, (ranks, others)."""
            found = functools.partial(bounds, tokens=tokens)
            return jax.vmap(jax.vmap(found))(first, end, row)

        first, end = parts(seen.first, seen.end, seen.row, tokens)
        first, end = first.min(1), end.max(1)
        key, key_end = parts(seen.key, seen.key_end, seen.row, self.key_tokens)
        # By whose they are: rank i is the first other of rank i + 1, and so on.
        readers = (every[:, None] + 1 + every[:-1]) % size, every[:-1]
        key, key_end = key[readers].min(1), key_end[readers].max(1)
        ends = first, end, key, key_end
        serves = pieced.are_right & are_all.all()
        way = self.ways.found(self._way(ends), serves, pieced.are_wrong)
        own = sequences.of_own(own, batch_tokens)
        seen = jax.tree.map(lambda x: x[rank], seen)
        return Found(way, _Packed(own, seen, *self._places(ends), pieced.every))

    @property
    def _tokens(self) -> int:
        return self.shape[0] * self.shape[1]

    def _queries(self, way: int | None, of: _Packed) -> Window:
        """Return which queries may see the keys of others, in a way."""
        batch, tokens = self.shape
        if way == SOME:
            return Window(of.at, few(tokens), batch, tokens)
        return Window(0, tokens, batch, tokens)

    def _keys(self, way: int | None, of: _Packed, rank) -> Window:
        """Return which keys of a rank may be seen by others, in a way."""
        batch, tokens = self.shape[0], self.key_tokens
        if way == SOME:
            return Window(of.keys_at[rank], few(tokens), batch, tokens)
        return Window(0, tokens, batch, tokens)

    def _own_keys(self, of: _Packed) -> Keys:
        """Return the own keys, which are NaN if this rank holds other tokens."""
        key, value, ids = self.ring.own_block
        return Keys(poison_unless(of.is_right, key), value, ids)

    def _sent(self, way: int | None, of: _Packed, own: Keys) -> Keys:
        """Return the part of the own keys that others may see.

        Where a way is the whole pass, ranks know each other's documents.
        """
        key, value, ids = own
        window = self._keys(way, of, self.ring.call.rank())
        return Keys(window.of(key), window.of(value), ids if way is None else None)

    def _no_keys(self) -> Keys:
        """Return few keys that nobody needs."""
        if not self.ring.last:
            return Keys(None, None, None)
        count = few(self.key_tokens)

        def none(x):
            return jnp.zeros_like(x, shape=(x.shape[0], count, *x.shape[2:]))

        key, value, _ = self.ring.own_block
        return Keys(none(key), none(value), None)

    def _last(self, block: Keys) -> Keys:
        """Return the block that is the last to be here on the way forward."""
        ring = self.ring
        return ring_shift(block, ring.call.axis_name, shift=ring.distances[-1])

    def _compute(self, found: Found, way: int | None, of: _Packed, ways, rest):
        """Compute a hop: in the way of the pass, or in that which was found."""
        if way is not None:
            return ways[way](of)
        return self.ways.take(found, ways[: len(self._every)], rest)

    def _attend(self, found: Found, way: int | None, of: _Packed):
        of = self._read(of)
        ring, own = self.ring, self.ring.own_block
        if not ring.last or way == OWN:
            return *self._attend_own(found, way, of, own), self._no_keys()
        own = self._own_keys(of)
        block = self._sent(way, of, own)
        arriving = ring.start(block, ring.shift(0))
        out, lse = self._attend_own(found, way, of, ring.then(arriving, own))
        # Not the log-sum-exp, whose dimensions would be moved for it.
        block = ring.done(arriving, after=out)
        queries = self._queries(way, of)
        merged = queries.of(out), queries.of(lse)
        if ring.last > 1:  # What is still to be summed is not rounded.
            merged = merged[0].astype(lse.dtype), merged[1]

        def hop(merged, block, turn):
            distance = ring.distance_at(turn)
            return self._attend_others(found, way, of, merged, block, distance)

        def step(turn, carry, shift):
            merged, block = carry
            arriving = ring.start(block, shift)
            merged = hop(merged, ring.then(arriving, block), turn)
            return merged, ring.done(arriving, after=merged[1])

        merged, block = ring.for_hops(1, ring.last, step, (merged, block))
        merged = hop(merged, block, ring.last)
        out, lse = map(queries.over, (out, lse), merged)
        return out, lse, block if way == SOME else self._no_keys()

    def _attend_own(self, found, way, of, block: Keys):
        hop = self.ring.hop(block, 0)

        def rounded(hop):
            out, lse = hop_forward(hop)
            return out.astype(self.inputs.query.dtype), lse

        def own(of):
            return rounded(hop.replace(packed=(of.own,)))

        return self._compute(found, way, of, [own] * 3, lambda: rounded(unpacked(hop)))

    def _attend_others(self, found, way, of, merged, block: Keys, distance):
        """Merge what the given queries saw before with the keys of another rank."""

        def add(hop):
            sums = hop.sum_dtype
            out, lse = merge((merged[0].astype(sums), merged[1]), hop_forward(hop))
            return out.astype(merged[0].dtype), lse

        def others(of):
            return add(self._others(way, of, block, distance))

        ways = [lambda of: merged, others, others]
        return self._compute(
            found, way, of, ways, lambda: add(unpacked(self.ring.hop(block, distance)))
        )

    def _differentiate(self, saved: Saved, sent_last: Keys, found, way, of: _Packed):
        of = self._read(of)
        ring, dtype, sums = self.ring, self.inputs.query.dtype, self.ring.own.sum_dtype
        own = ring.own_block
        if not ring.last or way == OWN:
            return self._own_gradients(found, way, of, saved, own)
        # Whatever the queries of wrong tokens add to the gradients of others is NaN.
        saved = saved._replace(lse=poison_unless(of.is_right, saved.lse))
        queries, sent = self._queries(way, of), self._keys(way, of, ring.call.rank())
        part = jax.tree.map(queries.of, saved)

        def hop(block, distance, total=None):
            query, *keys = self._gradients_of_others(
                found, way, of, part, block, distance
            )
            return query if total is None else total + query, keys

        def step(turn, carry, shift):
            # The gradients of a block follow the block one hop behind.
            total, grads, block = carry
            arriving = ring.start_pair(block, grads, *(-by for by in shift))
            total, added = hop(
                ring.then(arriving, block), ring.distance_at(ring.last - turn), total
            )
            block, following = ring.done(arriving, after=completion(added))
            return total, jax.tree.map(jnp.add, following, added), block

        last = ring.last
        block = sent_last if way == SOME else self._last(self._sent(way, of, own))
        if last > 1:
            arriving = ring.start(block, -ring.shift(last - 1))
            total, grads = hop(ring.then(arriving, block), ring.distance_at(last))
            block = ring.done(arriving, after=completion(grads))
            carry = total, grads, block
            total, grads, _ = ring.for_hops(1, last, step, carry, is_backward=True)
        else:  # They are the kernel's, and nothing was added.
            total, grads = hop(block, ring.distance_at(last))
            grads = [x.astype(dtype) for x in grads]
        following = ring.start(grads, -ring.shift(0))
        query, *keys = self._own_gradients(
            found, way, of, saved, ring.then(following, own)
        )[:3]
        following = ring.done(following, after=completion(keys))

        def add(window: Window, x, added):
            return window.over(x, window.of(x).astype(sums) + added.astype(sums))

        keys = [add(sent, x, y) for x, y in zip(keys, following, strict=True)]
        return poison_unless(of.is_right, Grads(add(queries, query, total), *keys))

    def _own_gradients(self, found, way, of, saved: Saved, block: Keys):
        hop = self.ring.hop(block, 0)

        def rounded(hop):
            grads = hop_backward(hop, saved.with_delta(hop))[:3]
            return Grads(*(x.astype(self.inputs.query.dtype) for x in grads))

        def own(of):
            return rounded(hop.replace(packed=(of.own,)))

        return self._compute(found, way, of, [own] * 3, lambda: rounded(unpacked(hop)))

    def _gradients_of_others(self, found, way, of, saved: Saved, block, distance):
        """Return those of the given queries, and of another rank's block."""

        def none(of):
            rows = *saved.out.shape[:3], block.key.shape[3]
            shapes = rows, block.key.shape, block.value.shape
            sums = self.ring.own.sum_dtype
            return [jnp.zeros_like(saved.out, sums, shape=shape) for shape in shapes]

        def of_hop(hop):
            return list(hop_backward(hop, saved.with_delta(hop))[:3])

        def others(of):
            return of_hop(self._others(way, of, block, distance))

        return self._compute(
            found,
            way,
            of,
            [none, others, others],
            lambda: of_hop(unpacked(self.ring.hop(block, distance))),
        )

    def _others(self, way: int | None, of: _Packed, block: Keys, distance) -> Hop:
        """Return the hop of the given queries and of another rank's keys."""
        _, source = members_at(self.ring.call, 1, distance)
        queries, keys = self._queries(way, of), self._keys(way, of, source)
        seen = jax.tree.map(lambda x: x[distance - 1], of.seen)
        hop = self.ring.hop(block, distance)
        ids = block.segment_ids
        if ids is None:
            pieces = jax.tree.map(lambda x: x[source], of.every)
            ids = pieces.segment_ids(keys)
        return hop.replace(
            query=queries.of(hop.query),
            queries=Coordinates(*map(queries.of, hop.queries)),
            keys=Coordinates(keys.of(hop.keys.positions), ids),
            query_segments=(queries.count,),
            key_segments=(keys.count,),
            blocks=(),
            block=None,
            runs=(Run((0, queries.count), (0, keys.count), "apart", False),),
            packed=(seen.starts(queries, keys),),
        )
