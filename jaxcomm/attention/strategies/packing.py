"""A ring of documents by a kernel that takes them packed.

Which way its documents allow is the same on all ranks. A GPU's host waits for the
tokens to know it: 45 us on an H100. So it asks once in each pass, for all hops, and the
way back asks for what the way forward found.

A rank's own keys are one call for all of its documents. Of another rank's keys a query
sees all that are of its document and lie before its piece, or none. Those that are seen
are gathered and computed in one call: see ``beside``. They go around a ring where they
take too much memory, or cannot be told in one call.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm import compat
from jaxcomm.attention.kernels.flash import sequences
from jaxcomm.attention.kernels.flash.pieces import Pieces, Seen, Starts
from jaxcomm.attention.kernels.kernel import Hop, Saved
from jaxcomm.attention.kernels.selection import is_flash, unpacked
from jaxcomm.attention.layout import positions_here
from jaxcomm.attention.mask import Coordinates
from jaxcomm.attention.pairs import Run
from jaxcomm.attention.permutation import poison, poison_unless
from jaxcomm.attention.strategies.beside import FewHops, in_rows
from jaxcomm.attention.strategies.loop import Loop, is_own
from jaxcomm.attention.strategies.strategy import AttentionCall, Inputs, keep
from jaxcomm.attention.table import ALL, FEWEST, MANY, NONE, OWN, SHARES, Table
from jaxcomm.collectives.all_reduce import psum

# How many pieces a rank may have: few are tried before many. Backward 1,024 cost 1.3
# times as much as the exact number did (24 documents in 32,768 tokens, one H100).
_FEW, _MANY = 64, 1024
# Where what is sent cannot be part of a way there is one number.
_MIDDLE = 256
# Of all ranks. All pairs of pieces are compared.
_MOST = 8192
# Bytes that gathered keys and values may take. As many are listed for the one call.
_GATHERED = 2**29


def packed_of(ring: Loop) -> "Packed | None":
    """Return a pass with documents, or None if no kernel takes them packed.

    FlashAttention does, if it computes the runs of all hops on the GPUs at hand.
    """
    if ring.inputs.query_ids is None:
        return None
    are_packed = all(
        hop.pairs.runs and is_flash(hop.packed([()] * len(hop.pairs.runs)))
        for hop in ring.hops
    )
    return Packed(ring) if are_packed else None


class Found(NamedTuple):
    """What a look at the tokens found.

    Attributes:
      way: int32 scalar, the same on all ranks: which way serves. As many as there are
        ways if none does; one more if a rank holds wrong tokens. Of a way that the
        program knows: whether it serves, bool.
      own: where the sequences of a rank's own keys begin, of each run.
      seen: what its queries see of the other ranks' keys, by distance; or None.
      every: the pieces of all ranks; or None.
      table: what both follow from, in the branch that reads it; or None.
      beside: where those begin that are computed beside the own, of each run.
    """

    way: Any
    own: tuple[Starts, ...]
    seen: Any = None
    every: Any = None
    table: Any = None
    beside: tuple[Starts, ...] = ()


@jax.custom_batching.custom_vmap
def over_batch(way):
    """Return the largest way of a batch: under vmap all sequences go one way."""
    return way


@over_batch.def_vmap
def _(axis_size, is_batched, way):
    return over_batch(way.max(0) if is_batched[0] else way), False


def pieces_of_all(call: AttentionCall, inputs: Inputs, most: int):
    """Return the pieces of all ranks. It costs a sum of some KiB for each rank.

    Returns:
      Those of each rank, with a dimension of ranks before; whether all are right; and
      whether a rank holds other tokens than its layout says.
    """
    rank = call.rank()
    at = positions_here(inputs.query_layout, rank)
    own, is_right = Pieces.of(Coordinates(at, inputs.query_ids), most)
    flags = is_right, True if inputs.is_right is None else inputs.is_right
    flags = jnp.stack([jnp.asarray(x) for x in flags]).astype(jnp.int32)
    sent = jnp.append(jnp.stack(own).reshape(-1), flags)
    table = jnp.zeros_like(sent, shape=(call.size, len(sent))).at[rank].set(sent)
    table = psum(table, call.axis_name)
    every = table[:, :-2].reshape(call.size, len(own), most)
    are_right, are_held = (table[:, -2:] > 0).all(0)
    return Pieces(*jnp.moveaxis(every, 1, 0)), are_right, ~are_held


def picked(tree, place):
    """Return what is at a place, or at several, of dimension 0 of arrays."""
    return jax.tree.map(lambda x: x[place], tree)


class Packed:
    """The passes of one call, of which documents are packed.

    Attributes:
      ring: the hops of the call.
      count: how many ways there are.
      way: the one that is taken, if the program knows it.
      sizes: what kernels are told of documents, or None.
      in_one_call: the ways in which keys of other ranks are computed in one call.
      is_whole: whether a way is the whole pass, with all that is sent. Else it is a
        part of it: groups of ranks may go different ways, and XLA's collectives wait
        for all.
    """

    def __init__(self, ring: Loop):
        self.ring, self.inputs = ring, ring.inputs
        self.count = NONE if ring.last else 1
        self.batch, self.tokens = self.inputs.query.shape[:2]
        has_pieces, sizes = ring.look is None, ring.call.sizes
        has_table = self.inputs.table is not None
        self.has_table = has_table and ring.call.mask.is_causal and has_pieces
        knows = self.has_table and ring.last
        if ring.beside is not None:
            # By the table a border is right if the numbers of documents ascend.
            knows = has_table and sizes is not None and not sizes.are_mixed
        self.way = ring.call.way if knows else None
        self.sizes = sizes if self.way is not None else None
        axes = ring.call.axis_name
        axes = set(axes if isinstance(axes, tuple) else (axes,))
        self.is_whole = compat.manual_axes() <= axes or self.way is not None
        key, value = self.inputs.key, self.inputs.value
        gathered = ring.call.size * (key.size + value.size) * key.dtype.itemsize
        # Between two ranks a ring is one call, too, and lists nothing.
        is_ring = ring.call.size == 2 or gathered > _GATHERED
        ways = SHARES if has_pieces else ()
        self.in_one_call = [way for way in ways if way != MANY or not is_ring]
        if not (self.is_whole and has_pieces):
            self.ring = ring.ready()

    def look(self) -> Found:
        """Look at the tokens of all ranks, or at the table that came with them."""
        if self.way is not None:
            look = self._look if self.ring.beside is not None else self._look_up
            return keep(look(0))
        look = self._look_up if self.has_table else self._look
        return self._looked(look(_FEW if self.is_whole else _MIDDLE))

    def _looked(self, found: Found) -> Found:
        return keep(found._replace(way=over_batch(found.way)))

    def found(self, way, serves, are_wrong=None):
        """Return the number of a way; of another one if it does not serve."""
        way = jnp.where(serves, way, self.count)
        return way if are_wrong is None else jnp.where(are_wrong, self.count + 1, way)

    def look_up(self) -> tuple[Found, Pieces]:
        """Return what a table says in a way that the program knows, and the pieces."""
        table = Table.of(self.inputs.table, self.ring.call.size, self.tokens)
        return self._look_up(0), self._pieces_of(table)

    def _look_up(self, most: int) -> Found:
        """Look at the table alone. Ranks tell each other if one holds other tokens.

        Of a way that the program knows it says whether it serves.
        """
        inputs, call = self.inputs, self.ring.call
        table = Table.of(inputs.table, call.size, self.tokens)
        is_right = picked(self._pieces_of(table), call.rank()).are_of(inputs.query_ids)
        if self.sizes is not None:
            holds = self.sizes.hold(table, self.way)
            table = self.sizes.told(table, holds, self.tokens)
            is_right &= holds
        if inputs.is_right is not None:
            is_right &= inputs.is_right
        way, are_wrong = table.way.max(), ~is_right
        if self.way != OWN:
            # Where nothing is sent each rank goes its own way.
            any_is = psum(are_wrong.astype(jnp.int32), call.axis_name) > 0
            are_wrong = jnp.where(way == OWN, are_wrong, any_is & (way < NONE))
        own = Starts(*(in_rows(table.own[:, i], self.tokens) for i in range(2)))
        if self.way is not None:
            way = ~are_wrong & (way <= self.way)
            return Found(way, (own,), table=inputs.table)
        way = self.found(way, way < NONE, are_wrong)
        found = Found(way, (own,), table=inputs.table)
        return found if self.is_whole else self._read(found)

    def _read(self, found: Found) -> Found:
        """Return what a table says. It is computed where it is needed: in a branch."""
        if found.table is None:
            return found
        table = Table.of(found.table, self.ring.call.size, self.tokens)
        some = None if self.sizes is None else self.sizes.documents + 1
        seen = Seen(*(self._places(table.seen[:, :, i, :some]) for i in range(4)))
        every = self._pieces_of(table)
        return found._replace(seen=seen, every=every, table=None)

    def _places(self, x):
        """Return places in rows, (B, ranks, n), in all rows: (ranks, B * n)."""
        row = jnp.arange(self.batch, dtype=jnp.int32) * self.tokens
        found = jnp.moveaxis(x + row[:, None, None], 0, 1)
        return found.reshape(len(found), -1)

    def _pieces_of(self, table: Table) -> Pieces:
        """Return the pieces of all ranks."""
        start, end = (self._places(table.every[:, :, i]) for i in range(2))
        document = jnp.moveaxis(table.every[:, :, 2], 0, 1).reshape(start.shape)
        row = jnp.arange(self.batch, dtype=jnp.int32).repeat(table.every.shape[-1])
        start, end = (
            jnp.where(start < end, x, self.batch * self.tokens) for x in (start, end)
        )
        # Nobody asks for positions.
        return Pieces(start, end, jnp.broadcast_to(row, start.shape), document, start)

    def _look(self, most: int) -> Found:
        if self.ring.look is not None:
            return self.ring.look(self, most)
        call, inputs = self.ring.call, self.inputs
        tokens = self.batch * self.tokens
        if not self.ring.last:
            rank = 0 if call.size == 1 else call.rank()
            held = positions_here(inputs.query_layout, rank)
            own, serves = Pieces.of(Coordinates(held, inputs.query_ids), most)
            is_held = inputs.is_right
            way = self.found(OWN, serves, None if is_held is None else ~is_held)
            return Found(way, (sequences.of_own(own, tokens),))
        pieces, are_right, are_wrong = pieces_of_all(call, inputs, most)
        # All pairs, so that all ranks know what each of them finds.
        every = jnp.arange(call.size, dtype=jnp.int32)
        others = (every[:, None] - 1 - every[:-1]) % call.size
        of_pair = functools.partial(
            Seen.of, mask=call.mask, batch=self.batch, tokens=self.tokens
        )
        of_rank = jax.vmap(of_pair, (None, 0))
        seen, are_all = jax.vmap(of_rank)(pieces, picked(pieces, others))
        way = jnp.where((seen.end > seen.first).any(), ALL, OWN)
        serves = are_right & are_all.all()
        own = sequences.of_own(picked(pieces, call.rank()), tokens)
        seen = picked(seen, call.rank())
        way = self.found(way, serves, are_wrong)
        return Found(way, (own,), seen, pieces)

    def forward(self, found: Found, attend: Callable[[Loop], Any]):
        """Return (out, lse) as ``attend`` does, in the dtype of the query."""
        if self.way is None:
            return self._in_a_way(found, attend)
        # Each query sees a value that is NaN; and the way back, the log-sum-exp.
        block = self.ring.own_block
        value = poison_unless(found.way, block.value)
        self.ring.own_block = block._replace(value=value)
        out, lse = self._in_a_way(found, attend)
        return out, poison_unless(found.way, lse)

    def backward(self, found: Found, saved: Saved, differentiate: Callable):
        """Return gradients as ``differentiate`` does, in the dtype of the query."""
        if not self.ring.own.has_residual:
            # What a way is given is computed, whichever is taken.
            saved = saved._replace(delta=None)
        return self._in_a_way(found, lambda ring: differentiate(ring, saved))

    def _in_a_way(self, found: Found, compute: Callable[[Loop], Any]):
        """Compute the hops of the way that was found."""

        def of_way(way, found):
            return compute(self._loop(way, found))

        if self.way is not None or not self.is_whole:
            return of_way(self.way, found)
        own, all_ = (functools.partial(of_way, way) for way in (OWN, ALL))
        of_many = [own, *[all_] * (NONE - 1)][: self.count]
        each = list(of_many)
        if self.has_table and self.ring.last:
            for way in self.in_one_call:
                each[way] = functools.partial(of_way, way)

        def rest():
            return compute(self.ring.unpacked())

        return self.take(found, each, rest, of_many)

    def take(
        self,
        found: Found,
        ways: Sequence[Callable[[Any], Any]],
        rest: Callable[[], Any],
        of_many: Sequence[Callable[[Any], Any]] | None = None,
    ):
        """Compute in the way that was found.

        Args:
          ways: each takes what was found. One that is there twice is compiled once.
          rest: computes all documents.
          of_many: the ways of more pieces, for which it looks again; or None.

        Returns:
          What the way returns; where tokens are wrong, what no result is.
        """
        many = min(_MANY, _MOST // self.ring.call.size)

        def more():
            return self.take(self._looked(self._look(many)), of_many or ways, rest)

        each = list(dict.fromkeys(ways))
        places = [each.index(way) for way in ways]
        may_look = of_many is not None and many > _FEW
        branches: list[Callable[[], Any]] = [
            *(functools.partial(way, found) for way in each),
            more if may_look else rest,
            lambda: self._wrong(ways[0], found),
        ]
        places += [len(each), len(each) + 1]
        return jax.lax.switch(jnp.asarray(places, jnp.int32)[found.way], branches)

    def _wrong(self, way, found):
        """Return what no result is, in the shapes of a way's results."""
        # An array of this rank: what comes of it differs between ranks too.
        none = self.inputs.query.reshape(-1)[0] * 0

        def wrong(x):
            return jnp.full(x.shape, poison(x.dtype), x.dtype) + none.astype(x.dtype)

        return jax.tree.map(wrong, jax.eval_shape(way, found))

    def _loop(self, way: int | None, found: Found) -> Loop:
        """Return the hops of a way; or those of which each goes the way it has to."""
        is_alone = not self.ring.last or way == OWN or way in self.in_one_call
        found = found if is_alone else self._read(found)
        ring = self.ring.packed(Packing(self, found, way is not None), is_alone)
        if self.way == OWN:
            ring.beside = None
        if way in self.in_one_call:
            table = Table.of(found.table, ring.call.size, self.tokens)
            told = self.sizes if way == MANY else None
            longest = told and (self.tokens, told.keys)
            of_way = table.few[way - FEWEST]
            ring.beside = FewHops(way, of_way, ring.call.size, self.tokens, longest)
        return ring


class Packing:
    """How the hops of one way are packed.

    Attributes:
      is_pass: whether the pass has a way. Else each hop asks for it.
    """

    def __init__(self, of: Packed, found: Found, is_pass: bool):
        self.of, self.found, self.is_pass = of, found, is_pass

    def segment_ids(self, source):
        """Return the documents of a rank's keys, which did not travel with them."""
        pieces = picked(self.found.every, source)
        return pieces.segment_ids(self.of.batch, self.of.tokens)

    def packed(self, hop: Hop, distance) -> Hop:
        """Return a hop that knows where documents begin."""
        if hop.pairs.is_packed:
            return hop
        if is_own(distance):
            sizes = self.of.sizes
            longest = sizes and (sizes.longest, sizes.longest)
            return hop.packed(self.found.own, longest)
        if self.found.beside:
            return hop.packed(self.found.beside)
        seen = picked(self.found.seen, distance - 1)
        counts = hop.query.shape[1], hop.key.shape[1]
        starts = seen.starts(*(self.of.batch * n for n in counts))
        run = Run((0, counts[0]), (0, counts[1]), "apart", False, starts)
        return hop.with_pairs(blocks=(), block=None, runs=(run,))

    def in_a_way(self, function, hop: Hop, distance, nothing):
        """Return ``function`` of a hop, or ``nothing()`` where nothing is seen."""
        packed = self.packed(hop, distance)

        def some(found):
            return function(packed)

        def none(found):
            return nothing()

        is_some = is_own(distance) or bool(self.found.beside)
        each = [some if is_some else none, *[some] * (NONE - 1)][: self.of.count]
        return self.of.take(self.found, each, lambda: function(unpacked(hop)))
