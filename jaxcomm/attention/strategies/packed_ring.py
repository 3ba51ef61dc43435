"""A ring of documents by a kernel that takes them packed.

A rank's own keys are one call for all of its documents. Of another rank's keys a query
sees all that are of its document and lie before its piece, or none. Where few queries
see any, and few keys are seen, those alone are sent and computed: see ``few``.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm.attention import order
from jaxcomm.attention.kernels.flash import sequences
from jaxcomm.attention.kernels.flash.pieces import Pieces, Seen, Starts
from jaxcomm.attention.kernels.kernel import Grads, Hop, Saved, merge
from jaxcomm.attention.kernels.primitive import hop_backward, hop_forward
from jaxcomm.attention.kernels.selection import unpacked
from jaxcomm.attention.mask import Coordinates, Run
from jaxcomm.attention.permutation import poison_unless
from jaxcomm.attention.strategies.few import Few, FewHops, in_rows
from jaxcomm.attention.strategies.hops import members_at
from jaxcomm.attention.strategies.loop import Loop, completion
from jaxcomm.attention.strategies.strategy import Keys, keep
from jaxcomm.attention.strategies.ways import Found, Pieced, Ways, ways_of
from jaxcomm.attention.table import ALL, FEW, FEWEST, NONE, OWN, SHARES, Table
from jaxcomm.collectives.all_reduce import psum
from jaxcomm.collectives.permute import ring_shift


class _Known(NamedTuple):
    """What is known of the tokens.

    Attributes:
      own: where the sequences of a rank's own keys begin.
      few: of each measure of what is few; empty where nobody knows.
      seen: what its queries see of the other ranks' keys, by distance; or None.
      every: the pieces of all ranks; or None.
      table: what both follow from, in the branch that reads it; or None.
    """

    own: Starts
    few: tuple[Few, ...] = ()
    seen: Any = None
    every: Any = None
    table: Any = None


def packed_ring(ring: Loop) -> "PackedRing | None":
    """Return a ring of documents, or None if no kernel takes them packed."""
    ways = ways_of(ring.call, ring.inputs, NONE if ring.last else 1, *ring.hops)
    return None if ways is None else PackedRing(ring, ways)


class PackedRing:
    """The passes of one call.

    Attributes:
      ring: the hops of the call.
      ways: how they may be computed.
      way: the one that is taken, if the program knows it.
      is_whole: whether a way is the whole pass.
    """

    def __init__(self, ring: Loop, ways: Ways):
        self.ring, self.ways, self.inputs = ring, ways, ring.inputs
        self.batch, self.tokens = self.inputs.query.shape[:2]
        mask = ring.call.mask
        self.has_table = self.inputs.table is not None and mask.is_causal
        self.way = ring.call.way if self.has_table and ring.last else None
        self.is_whole = ways.is_whole or self.way is not None
        if not self.is_whole:
            self.ring = ring.gathered()

    def look(self) -> Found:
        """Look at the tokens of all ranks, or at the table that came with them."""
        if self.way is not None:
            return keep(self._look_up(0))
        return self.ways.look(self._look_up if self.has_table else self._look)

    def _look_up(self, most: int) -> Found:
        """Look at the table alone. Ranks tell each other if one holds other tokens.

        Of a way that the program knows it says whether it serves.
        """
        inputs, call = self.inputs, self.ring.call
        table = Table.of(inputs.table, call.size)
        held = jax.tree.map(lambda x: x[call.rank()], self._pieces_of(table))
        is_right = held.are_of(inputs.query_ids)
        if inputs.is_right is not None:
            is_right &= inputs.is_right
        way, are_wrong = table.way.max(), ~is_right
        if self.way != OWN:
            # Where nothing is sent each rank goes its own way.
            some = psum(are_wrong.astype(jnp.int32), call.axis_name) > 0
            are_wrong = jnp.where(way == OWN, are_wrong, some & (way < NONE))
        own = Starts(*(in_rows(table.own[:, i], self.tokens) for i in range(2)))
        few_of = tuple(
            Few.of(measure, at, starts, call.size, self.tokens)
            for at, starts, measure in zip(
                jnp.moveaxis(table.at, 1, 0), jnp.moveaxis(table.few, 1, 0), SHARES,
                strict=True,
            )
        )  # fmt: skip
        known = _Known(own, few_of, table=inputs.table)
        if self.way is not None:
            return Found(~are_wrong & (way <= self.way), known)
        if not self.is_whole:
            known = self._read(known)
        return Found(self.ways.found(way, way < NONE, are_wrong), known)

    def _read(self, known: _Known) -> _Known:
        """Return what a table says. It is computed where it is needed: in a branch."""
        if known.table is None:
            return known
        table = Table.of(known.table, self.ring.call.size)
        seen = Seen(*(self._places(table.seen[:, :, i]) for i in range(4)))
        return _Known(known.own, (), seen, self._pieces_of(table))

    def _places(self, x):
        """Return places in rows, (B, ranks, n), in all rows: (ranks, B * n)."""
        row = jnp.arange(self.batch, dtype=jnp.int32) * self.tokens
        found = jnp.moveaxis(x + row[:, None, None], 0, 1)
        return found.reshape(len(found), -1)

    def _pieces_of(self, table: Table) -> Pieces:
        """Return the pieces of all ranks."""
        start, end = (self._places(table.every[:, :, i]) for i in range(2))
        document = jnp.moveaxis(table.every[:, :, 2], 0, 1).reshape(start.shape)
        return Pieces(start, end, start, document, start)

    def _look(self, most: int) -> Found:
        call, inputs = self.ring.call, self.inputs
        tokens = self.batch * self.tokens
        if not self.ring.last:
            rank = 0 if call.size == 1 else call.rank()
            at = order.held(inputs.query_layout, rank)
            own, serves = Pieces.of(Coordinates(at, inputs.query_ids), most)
            is_held = inputs.is_right
            way = self.ways.found(OWN, serves, None if is_held is None else ~is_held)
            return Found(way, _Known(sequences.of_own(own, tokens)))
        pieced = Pieced.of(call, inputs, most)
        # All pairs, so that all ranks know what each of them finds.
        every = jnp.arange(call.size, dtype=jnp.int32)
        others = (every[:, None] - 1 - every[:-1]) % call.size
        of_pair = functools.partial(
            Seen.of, mask=call.mask, batch=self.batch, tokens=self.tokens
        )
        of_rank = jax.vmap(of_pair, (None, 0))
        seen, are_all = jax.vmap(of_rank)(pieced.every, pieced.at(others))
        way = jnp.where((seen.end > seen.first).any(), ALL, OWN)
        serves = pieced.are_right & are_all.all()
        own = sequences.of_own(pieced.at(call.rank()), tokens)
        seen = jax.tree.map(lambda x: x[call.rank()], seen)
        known = _Known(own, (), seen, pieced.every)
        return Found(self.ways.found(way, serves, pieced.are_wrong), known)

    def forward(self, found: Found, generic: Callable[[], Any]):
        """Attend.

        Args:
          generic: does so by hops of any documents, and returns (out, lse).

        Returns:
          (out, lse), out in the dtype of the query.
        """
        if self.way is None:
            return self._take(found, self._attend, generic)
        # Each query sees a value that is NaN; and the way back, the log-sum-exp.
        key, value, ids = self.ring.own_block
        self.ring.own_block = Keys(key, poison_unless(found.way, value), ids)
        out, lse = self._attend(found, self.way, found.of_ways)
        return out, poison_unless(found.way, lse)

    def backward(self, found: Found, saved: Saved, generic: Callable[[Keys], Any]):
        """Return gradients of query, key and value in their dtype.

        Args:
          generic: takes the last block, and returns them by hops of any documents.
        """
        if not self.ring.own.has_residual:
            # What a way is given is computed, whichever is taken.
            saved = saved._replace(delta=None)
        if self.way is not None:
            return self._differentiate(saved, found, self.way, found.of_ways)
        return self._take(
            found,
            functools.partial(self._differentiate, saved),
            lambda: generic(self._last(self.ring.own_block)),
        )

    def _take(self, found: Found, compute, rest):
        if not self.is_whole:
            return compute(found, None, found.of_ways)
        own, all_ = (functools.partial(compute, found, way) for way in (OWN, ALL))
        of_many = [own, all_, all_, all_] if self.ring.last else [own]
        each = list(of_many)
        if self.has_table and self.ring.last:
            for way in SHARES:
                each[way] = functools.partial(compute, found, way)
        return self.ways.take(found, each, rest, self._look, of_many)

    def _last(self, block: Keys) -> Keys:
        """Return the block that is the last to be here on the way forward."""
        ring = self.ring
        return ring_shift(block, ring.call.axis_name, shift=ring.distances[-1])

    def _compute(self, found: Found, way: int | None, known: _Known, ways, rest):
        """Compute a hop: in the way of the pass, or in that which was found.

        Args:
          ways: of which nothing of others is seen, and of which something is.
        """
        own, all_ = ways
        if way is not None:
            return (own if way == OWN else all_)(known)
        each = [own, all_, all_, all_] if self.ring.last else [own]
        return self.ways.take(found, each, rest)

    def _attend(self, found: Found, way: int | None, known: _Known):
        ring, own = self.ring, self.ring.own_block
        if not ring.last or way == OWN:
            return self._attend_own(found, way, known, own)
        if way in (FEWEST, FEW):
            hops = FewHops(ring, way, known.few[way - FEWEST])
            arriving = hops.start()
            out, lse = self._attend_own(found, way, known, ring.then(arriving, own))
            return hops.attend(out, lse, ring.done(arriving, after=out))
        known, ring = self._read(known), ring.gathered()
        block = self._sent(way, own)
        arriving = ring.start(block, ring.shift(0))
        out, lse = self._attend_own(found, way, known, ring.then(arriving, own))
        # Not the log-sum-exp, whose dimensions would be moved for it.
        block = ring.done(arriving, after=out)
        merged = out, lse
        if ring.last > 1:  # What is still to be summed is not rounded.
            merged = out.astype(lse.dtype), lse

        def hop(merged, block, turn):
            hop = self._others(ring, known, block, ring.distance_at(turn))
            return self._attend_others(found, way, known, merged, *hop)

        def step(turn, carry, shift):
            merged, block = carry
            arriving = ring.start(block, shift)
            merged = hop(merged, ring.then(arriving, block), turn)
            return merged, ring.done(arriving, after=merged[1])

        merged, block = ring.for_hops(1, ring.last, step, (merged, block))
        merged = hop(merged, block, ring.last)
        return merged[0].astype(out.dtype), merged[1]

    def _sent(self, way: int | None, own: Keys) -> Keys:
        """Return what is sent of the own keys.

        Where a way is the whole pass, ranks know each other's documents.
        """
        return own if way is None else own._replace(segment_ids=None)

    def _attend_own(self, found, way, known, block: Keys):
        hop = self.ring.hop(block, 0)

        def rounded(hop):
            out, lse = hop_forward(hop)
            return out.astype(self.inputs.query.dtype), lse

        def own(known):
            return rounded(hop.replace(packed=(known.own,)))

        return self._compute(
            found, way, known, (own, own), lambda: rounded(unpacked(hop))
        )

    def _attend_others(self, found, way, known, merged, packed: Hop, hop: Hop):
        """Merge what the queries saw before with the keys of another rank."""

        def add(hop):
            sums = hop.sum_dtype
            out, lse = merge((merged[0].astype(sums), merged[1]), hop_forward(hop))
            return out.astype(merged[0].dtype), lse

        ways = lambda known: merged, lambda known: add(packed)
        return self._compute(found, way, known, ways, lambda: add(unpacked(hop)))

    def _differentiate(self, saved: Saved, found, way, known: _Known):
        ring, dtype, sums = self.ring, self.inputs.query.dtype, self.ring.own.sum_dtype
        own = ring.own_block
        if not ring.last or way == OWN:
            return self._own_gradients(found, way, known, saved, own)
        if way in (FEWEST, FEW):
            hops = FewHops(ring, way, known.few[way - FEWEST])
            arriving = hops.start()
            grads = self._own_gradients(
                found, way, known, saved, ring.then(arriving, own)
            )
            return hops.differentiate(
                grads, saved, ring.done(arriving, after=completion(grads.key))
            )
        known, ring = self._read(known), ring.gathered()

        def hop(block, distance, total=None):
            hops = self._others(ring, known, block, distance)
            query, *keys = self._gradients_of_others(found, way, known, saved, *hops)
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
        block = self._last(self._sent(way, own))
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
            found, way, known, saved, ring.then(following, own)
        )[:3]
        following = ring.done(following, after=completion(keys))

        def add(x, added):
            return (x.astype(sums) + added.astype(sums)).astype(dtype)

        return Grads(add(query, total), *map(add, keys, following))

    def _own_gradients(self, found, way, known, saved: Saved, block: Keys):
        hop = self.ring.hop(block, 0)

        def rounded(hop):
            grads = hop_backward(hop, saved.with_delta(hop))[:3]
            return Grads(*(x.astype(self.inputs.query.dtype) for x in grads))

        def own(known):
            return rounded(hop.replace(packed=(known.own,)))

        return self._compute(
            found, way, known, (own, own), lambda: rounded(unpacked(hop))
        )

    def _gradients_of_others(self, found, way, known, saved: Saved, packed, hop):
        """Return those of the queries, and of another rank's block."""

        def none(known):
            sums = hop.sum_dtype
            return [jnp.zeros_like(x, sums) for x in (hop.query, hop.key, hop.value)]

        def of_hop(hop):
            return list(hop_backward(hop, saved.with_delta(hop))[:3])

        ways = none, lambda known: of_hop(packed)
        return self._compute(found, way, known, ways, lambda: of_hop(unpacked(hop)))

    def _others(self, ring: Loop, known: _Known, block: Keys, distance):
        """Return the hop of another rank's keys: packed, and for other kernels."""
        _, source = members_at(ring.call, 1, distance)
        seen = jax.tree.map(lambda x: x[distance - 1], known.seen)
        if block.segment_ids is None:
            pieces = jax.tree.map(lambda x: x[source], known.every)
            ids = pieces.segment_ids(self.batch, self.tokens)
            block = block._replace(segment_ids=ids)
        hop = ring.hop(block, distance)
        counts = hop.query.shape[1], hop.key.shape[1]
        packed = hop.replace(
            blocks=(),
            block=None,
            runs=(Run((0, counts[0]), (0, counts[1]), "apart", False),),
            packed=(seen.starts(*(self.batch * n for n in counts)),),
        )
        return packed, hop
