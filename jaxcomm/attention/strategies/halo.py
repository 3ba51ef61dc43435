"""Halo: each rank receives the border of its neighbours that a window reaches."""

import copy
import dataclasses
import itertools

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.flash.sequences import border_of, of_border, of_own
from jaxcomm.attention.kernels.kernel import Grads, Hop, Saved
from jaxcomm.attention.kernels.primitive import hop_backward, hop_forward
from jaxcomm.attention.kernels.selection import narrowed
from jaxcomm.attention.mask import PADDING, Block, Coordinates, Run
from jaxcomm.attention.strategies.all_gather import Gathered, may_have_runs
from jaxcomm.attention.strategies.hops import (
    Slice,
    consecutive,
    own_hop,
    seen_slices,
)
from jaxcomm.attention.strategies.part import Part
from jaxcomm.attention.strategies.strategy import (
    AttentionCall,
    Cost,
    Inputs,
    Keys,
    coordinates_of,
)
from jaxcomm.attention.strategies.ways import (
    AllPieces,
    Found,
    ways_of,
)
from jaxcomm.collectives.permute import ring_shift
from jaxcomm.collectives.split_phase import ring_shift_start


@dataclasses.dataclass(frozen=True)
class Halo(Gathered):
    """Only the keys that a window reaches travel, straight to where they are needed.

    One send for each rank that is reached: of a contiguous layout the last tokens of
    the rank before, of zigzag a border in both directions. Bytes depend on the window
    and not on the length. Gradients come back in float32.

    Source: Megatron-LM, issue 5593, "swa_p2p", 2026.
    """

    name = "halo"

    def why_not(self, problem):
        if not (problem.query_layout.is_static and problem.key_layout.is_static):
            return "the layout is data: who needs which keys is not known in time"
        if problem.mask.left is None or problem.mask.right is None:
            return (
                "there is no window, or it is as long as the sequence: pass a shorter "
                "local_window_size. With is_causal=True its left side counts"
            )
        return None

    def cost(self, problem):
        sends = self._sends(problem, problem)
        held = problem.key_layout.local_length
        tokens = sum(part.stop - part.start for _, of in sends for part in of)
        share = tokens / max(held, 1)
        return Cost(
            len(sends),
            share * problem.block_bytes,
            share * (problem.block_bytes + problem.key_grad_bytes),
            (1 + share) * problem.key_bytes,
            # On GPUs the own keys are computed while one border travels.
            overlaps=sum(len(of) for _, of in sends) == 1,
        )

    def _sends(self, call, inputs) -> list[tuple[int, list[Slice]]]:
        """Return what is sent by how many ranks it goes further, the farthest first."""
        found = seen_slices(inputs.query_layout, inputs.key_layout, call.mask)
        by_shift = itertools.groupby(found, lambda part: part.shift)
        return [(shift, list(parts)) for shift, parts in by_shift][::-1]

    def _parts(self, call, inputs) -> list[Slice]:
        """Return the gathered keys in their order: a rank's own are the last."""
        parts = [part for _, of in self._sends(call, inputs) for part in of]
        return [*parts, Slice(0, 0, inputs.key_layout.local_length)]

    def runs(self, call, inputs):
        *border, own = self._parts(call, inputs)
        shifts = [part.shift for part in border]
        # Keys of the ranks before, one behind the other, and all of those between.
        is_natural = (
            consecutive(inputs.key_layout) == ((0, own.stop),)
            and shifts == list(range(len(shifts), 0, -1))
            and all(part.stop == own.stop for part in border)
            and not any(part.start for part in border[1:])
            and call.mask.right == 0
        )
        if not is_natural:
            return ()
        keys = sum(part.stop - part.start for part in (*border, own))
        return (Run((0, own.stop), (0, keys)),)

    def _border(self, call, inputs) -> int:
        """Return how many keys of the rank before are all that its queries need.

        It is 0 where more is needed, or no kernel goes by runs. While they travel, a
        rank's own keys are computed.
        """
        parts = self._parts(call, inputs)
        layout, left = inputs.key_layout, call.mask.left
        may = may_have_runs(call, inputs) and inputs.slopes is None
        may = may and bool(self.runs(call, inputs))
        has_padding = layout.length != call.size * layout.local_length
        if not may or len(parts) != 2 or has_padding or left > layout.local_length:
            return 0
        return parts[0].stop - parts[0].start

    def forward(self, call, inputs):
        if not self._border(call, inputs):
            return super().forward(call, inputs)
        halo = _Border(call, inputs, self._border(call, inputs))
        if halo.ways is None:
            inputs = inputs.poisoned()
            halo = _Border(call, inputs, halo.keys)
        else:
            halo.found = halo.ways.look(halo.look)
        out, lse = halo.in_a_way(_Border.attend)
        return (out.astype(lse.dtype), lse), (inputs, halo.found)

    def backward(self, call, kept, saved):
        inputs, found = kept
        if not self._border(call, inputs):
            return super().backward(call, kept, saved)
        halo = _Border(call, inputs, self._border(call, inputs))
        halo.found = found
        if halo.ways is not None and not call.hop.has_residual:
            # What a way is given is computed, whichever is taken.
            saved = saved._replace(delta=None)
        grads = halo.in_a_way(lambda halo: halo.differentiate(saved))
        return Grads(*(x.astype(saved.lse.dtype) for x in grads[:3]))

    def gather(self, call, inputs, keys):
        arrived = []
        for shift, parts in self._sends(call, inputs):
            cut = [
                jax.tree.map(lambda x, part=part: x[:, part.start : part.stop], keys)
                for part in parts
            ]
            arrived += ring_shift(cut, call.axis_name, shift=shift)
        arrived.append(keys)
        return Keys(*jax.tree.map(lambda *xs: jnp.concatenate(xs, 1), *arrived))

    def positions(self, call, inputs):
        held = [
            inputs.key_layout.positions_of((call.rank() - part.shift) % call.size)[
                part.start : part.stop
            ]
            for part in self._parts(call, inputs)
        ]
        return jnp.concatenate([jnp.asarray(x) for x in held])

    def segments(self, call, inputs):
        *border, _ = self._parts(call, inputs)
        sizes = tuple(part.stop - part.start for part in border)
        return sizes + inputs.key_layout.segments

    def scatter(self, call, inputs, grads):
        start, total = 0, jax.tree.map(lambda x: x[:, -inputs.key.shape[1] :], grads)
        for shift, parts in self._sends(call, inputs):
            cut = []
            for part in parts:
                stop = start + part.stop - part.start
                cut.append(jax.tree.map(lambda x, a=start, b=stop: x[:, a:b], grads))
                start = stop
            back = ring_shift(cut, call.axis_name, shift=-shift)
            for part, added in zip(parts, back, strict=True):
                total = jax.tree.map(
                    lambda x, y, part=part: x.at[:, part.start : part.stop].add(y),
                    total,
                    added,
                )
        return total

    def columns(self, call, inputs, bias):
        return jnp.concatenate(
            [
                jax.lax.dynamic_slice_in_dim(bias, start, count, axis=3)
                for start, count in self._columns(call, inputs)
            ],
            3,
        )

    def add_columns(self, call, inputs, grad_bias):
        shape = (*grad_bias.shape[:3], call.size * inputs.key.shape[1])
        total, at = jnp.zeros_like(grad_bias, shape=shape), 0
        for start, count in self._columns(call, inputs):
            part = jax.lax.slice_in_dim(grad_bias, at, at + count, axis=3)
            # Slices of one rank are of different keys.
            total = jax.lax.dynamic_update_slice_in_dim(total, part, start, axis=3)
            at += count
        return total

    def _columns(self, call, inputs):
        """Return start and count of the columns of each part of the gathered keys."""
        rank, keys = call.rank(), inputs.key.shape[1]
        return [
            (
                (rank - part.shift) % call.size * keys + part.start,
                part.stop - part.start,
            )
            for part in self._parts(call, inputs)
        ]


class _Border:
    """A rank's own keys, and the border of the rank before, as two hops.

    Attributes:
      keys: how many keys the border has.
      rows: how many queries see some of it, the first ones.
      is_first: traced, whether this is the first rank.
      ways: how both hops may be computed, or None.
      found: which way serves, and where the sequences of each hop begin.
    """

    def __init__(self, call: AttentionCall, inputs: Inputs, keys: int):
        self.call, self.inputs, self.keys = call, inputs, keys
        self.rows = min(call.mask.left or 0, inputs.query.shape[1])
        self.is_first = call.rank() == 0
        self.found = Found(None, None)
        self._pack = None
        self.first, self.last = Part(slice(self.rows)), Part(slice(-keys, None))
        own, tail = own_hop(call, inputs), jax.tree.map(self.last.of, inputs.keys)
        behind = self.behind(tail)
        self.ways = ways_of(call, inputs, 1, own, behind)

    def look(self, most: int) -> Found:
        """Look at the documents of each rank and of the one before it."""
        batch, tokens = self.inputs.query.shape[:2]
        pieces = AllPieces.of(self.call, self.inputs, most)
        ranks, rank = jnp.arange(self.call.size, dtype=jnp.int32), self.call.rank()

        def border(queries, keys, rank):
            seen, is_right = border_of(queries, keys, batch, tokens, self.keys)
            return jnp.where(rank == 0, 0, seen), is_right | (rank == 0)

        every = pieces.every, pieces.at((ranks - 1) % self.call.size)
        seen, are_right = jax.vmap(border)(*every, ranks)
        serves = pieces.are_right & are_right.all()
        run = Run((0, self.rows), (0, self.keys), "behind")
        own = of_own(pieces.at(rank), batch * tokens)
        return Found(
            self.ways.found(0, serves, pieces.are_wrong),  # pyright: ignore
            [(own,), (of_border(batch, run, seen[rank]),)],
        )

    def in_a_way(self, compute):
        """Return what ``compute`` does, in the way that was found."""
        if self.ways is None or not self.ways.is_whole:
            return compute(self)

        def packed(pack):
            halo = copy.copy(self)
            halo._pack = pack
            return compute(halo)

        return self.ways.of_pass(self.found, packed, self.look)

    def _compute(self, compute, hop: Hop, which: int):
        """Compute a hop in the way of the pass, or in the one that was found."""
        if self.ways is None:
            return compute(hop)

        def packed(pack):
            return compute(pack(hop, which))

        return (
            packed(self._pack) if self._pack else self.ways.of_pass(self.found, packed)
        )

    def attend(self):
        """Return (out, lse), out in the dtype of the query."""
        dtype = self.inputs.query.dtype

        def own(hop):
            out, lse = hop_forward(hop)
            # What a way returns is in memory: no more digits than are needed.
            return (out if self.ways is None else out.astype(dtype)), lse

        arriving = self.start()
        out, lse = self._compute(own, self.own(arriving), 0)
        behind = self.behind(arriving.done(after=lse))
        rows, row_lse = self._compute(hop_forward, behind, 1)
        row_lse = jnp.where(self.is_first, -jnp.inf, row_lse)
        return self.first.merged(out, lse, (rows, row_lse), dtype=dtype)

    def differentiate(self, saved: Saved) -> Grads:
        """Return the gradients of query, key and value in their dtype."""
        dtype = self.inputs.query.dtype

        def own(hop):
            grads = hop_backward(hop, self._saved(hop, saved))[:3]
            return [x if self.ways is None else x.astype(dtype) for x in grads]

        def behind(hop):
            # Of the first rank, which has no rank before it, all weights become 0.
            lse = jnp.where(self.is_first, -jnp.inf, of_rows.lse)
            return hop_backward(hop, self._saved(hop, of_rows._replace(lse=lse)))[:3]

        arriving = self.start()
        query, *keys = self._compute(own, self.own(arriving), 0)
        of_rows = jax.tree.map(self.first.of, saved)
        arrived = arriving.done(after=query[:1, :1, :1, :1])
        border, *of_keys = self._compute(behind, self.behind(arrived), 1)
        back = ring_shift(of_keys, self.call.axis_name, shift=-1)
        how = {"sums": border.dtype, "dtype": dtype}
        query = self.first.plus(query, border, **how)
        pairs = zip(keys, back, strict=True)
        return Grads(query, *(self.last.plus(x, added, **how) for x, added in pairs))

    def _saved(self, hop: Hop, saved: Saved) -> Saved:
        return saved if self.ways is None else saved.with_delta(hop)

    def start(self):
        """Begin to send the own border to the next rank."""
        tail = jax.tree.map(self.last.of, self.inputs.keys)
        return ring_shift_start(tail, self.call.axis_name, shift=1)

    def own(self, arriving) -> Hop:
        """Return the hop of the own keys, to be computed while the border is sent."""
        inputs, layout = self.inputs, self.inputs.key_layout
        tokens = coordinates_of(layout, self.call.rank(), 1, inputs.key_ids)
        key, value = arriving.then((inputs.key, inputs.value))
        return own_hop(self.call, inputs).replace(
            key=key, value=value, queries=tokens, keys=tokens
        )

    def behind(self, keys: Keys) -> Hop:
        """Return the hop of the first rows and of the border."""
        inputs, layout, rank = self.inputs, self.inputs.key_layout, self.call.rank()
        count, rows, left = self.keys, self.rows, self.call.mask.left or 0
        at = jnp.asarray(layout.positions_of(rank))
        before = jnp.asarray(layout.positions_of((rank - 1) % self.call.size))[-count:]
        ids, key_ids = inputs.query_ids, keys.segment_ids
        if ids is not None:
            ids = ids[:, :rows]
            key_ids = jnp.where(self.is_first, PADDING, key_ids)
        whole = (0, rows), (0, count)
        hop = self.call.hop.replace(
            query=inputs.query[:, :rows],
            key=keys.key,
            value=keys.value,
            queries=Coordinates(at[:rows], ids),
            keys=Coordinates(before, key_ids),
            slopes=inputs.slopes,
            seeds=inputs.seeds,
            query_segments=(rows,),
            key_segments=(count,),
            runs=(Run(*whole, "behind"),),
        )
        return narrowed(hop, (Block(*whole, left=left - count),))
