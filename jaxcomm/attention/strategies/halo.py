"""Halo: each rank receives the border of its neighbours that a window reaches."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.flash.sequences import border_of, of_border, of_own
from jaxcomm.attention.kernels.selection import narrowed
from jaxcomm.attention.mask import PADDING, Coordinates
from jaxcomm.attention.pairs import Block, Pairs, Run
from jaxcomm.attention.strategies.all_gather import Gathered, may_have_runs
from jaxcomm.attention.strategies.beside import Beside, Part
from jaxcomm.attention.strategies.hops import (
    Slice,
    consecutive,
    hops_of,
    seen_slices,
)
from jaxcomm.attention.strategies.loop import Loop
from jaxcomm.attention.strategies.packing import Found, Packed, picked, pieces_of_all
from jaxcomm.attention.strategies.strategy import AttentionCall, Cost, Inputs
from jaxcomm.attention.table import OWN
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

    def loop(self, call, inputs):
        keys = self._border(call, inputs)
        return _Border.of(call, inputs, keys) if keys else super().loop(call, inputs)

    def collect(self, call, inputs):
        arrived, layout, rank = [], inputs.key_layout, call.rank()
        for shift, parts in self._sends(call, inputs):
            cut = [_cut(inputs.keys, part.start, part.stop) for part in parts]
            arrived += ring_shift(cut, call.axis_name, shift=shift)
        arrived.append(inputs.keys)
        keys = jax.tree.map(lambda *xs: jnp.concatenate(xs, 1), *arrived)
        parts = self._parts(call, inputs)
        held = [
            layout.positions_of((rank - part.shift) % call.size)[part.start : part.stop]
            for part in parts
        ]
        positions = jnp.concatenate([jnp.asarray(x) for x in held])
        segments = tuple(part.stop - part.start for part in parts[:-1])
        return keys, positions, segments + layout.segments

    def scatter(self, call, inputs, grads):
        start, total = 0, _cut(grads, -inputs.key.shape[1], None)
        for shift, parts in self._sends(call, inputs):
            cut = []
            for part in parts:
                cut.append(_cut(grads, start, start + part.stop - part.start))
                start += part.stop - part.start
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


def _cut(tree, start: int, stop: int | None):
    """Return some tokens of arrays (B, T, ...)."""
    return jax.tree.map(lambda x: x[:, start:stop], tree)


class _Border(Beside):
    """The border of the rank before, beside a rank's own keys.

    Attributes:
      border: how many keys the border has.
      rows: how many queries see some of it, the first ones.
      is_first: traced, whether this is the first rank.
    """

    def __init__(self, call: AttentionCall, inputs: Inputs, border: int):
        self.call, self.inputs, self.border = call, inputs, border
        self.rows = min(call.mask.left or 0, inputs.query.shape[1])
        self.is_first = call.rank() == 0
        self.queries, self.keys = Part(slice(self.rows)), Part(slice(-border, None))

    @classmethod
    def of(cls, call: AttentionCall, inputs: Inputs, border: int) -> Loop:
        """Return the hops of a pass with a border."""
        loop = Loop(call, inputs, hops_of(call, inputs)[0])
        beside = cls(call, inputs, border)
        whole = (0, beside.rows), (0, border)
        loop.beside, loop.look = beside, beside.look
        segments, run = ((beside.rows,), (border,)), Run(*whole, "behind")
        loop.others = call.hop.replace(
            scores=call.scores(inputs, None),
            pairs=Pairs(call.mask, segments=segments, runs=(run,)),
        )
        hop = beside.hop(loop, jax.tree.map(beside.keys.of, inputs.keys))
        block = Block(*whole, left=(call.mask.left or 0) - border)
        loop.others = narrowed(hop, (block,))
        return loop

    def look(self, packed: Packed, most: int) -> Found:
        """Look at the documents of each rank and of the one before it."""
        batch, tokens = self.inputs.query.shape[:2]
        ranks, rank = jnp.arange(self.call.size, dtype=jnp.int32), self.call.rank()

        def border(queries, keys, rank):
            seen, is_right = border_of(queries, keys, batch, tokens, self.border)
            return jnp.where(rank == 0, 0, seen), is_right | (rank == 0)

        run = Run((0, self.rows), (0, self.border), "behind")
        if packed.way is not None:
            found, pieces = packed.look_up()
            if packed.way == OWN:
                return found
            before = picked(pieces, (rank - 1) % self.call.size)
            seen, is_all = border(picked(pieces, rank), before, rank)
            beside = (of_border(batch, run, seen),)
            return found._replace(way=found.way & is_all, beside=beside)
        pieces, are_right, are_wrong = pieces_of_all(self.call, self.inputs, most)
        before = picked(pieces, (ranks - 1) % self.call.size)
        seen, are_all = jax.vmap(border)(pieces, before, ranks)
        own = of_own(picked(pieces, rank), batch * tokens)
        way = packed.found(0, are_right & are_all.all(), are_wrong)
        return Found(way, (own,), beside=(of_border(batch, run, seen[rank]),))

    def start(self, loop):
        tail = jax.tree.map(self.keys.of, loop.own_block)
        return ring_shift_start(tail, self.call.axis_name, shift=1)

    def home(self, loop, grads):
        return [[x] for x in ring_shift(grads, self.call.axis_name, shift=-1)]

    def seen(self, lse):
        # The first rank has no rank before it.
        return jnp.where(self.is_first, -jnp.inf, lse)

    def hop(self, loop, keys):
        layout, rank, ids = loop.inputs.key_layout, self.call.rank(), keys.segment_ids
        at = jnp.asarray(layout.positions_of(rank))
        before = jnp.asarray(layout.positions_of((rank - 1) % self.call.size))
        queries = Coordinates(at, loop.inputs.query_ids)
        if ids is not None:
            ids = jnp.where(self.is_first, PADDING, ids)
            queries = queries._replace(segment_ids=self.queries.of(queries.segment_ids))
        query = self.queries.of(loop.inputs.query)
        hop = loop.others.replace(query=query, key=keys.key, value=keys.value)
        return hop.with_pairs(
            queries=queries._replace(positions=at[: self.rows]),
            keys=Coordinates(before[-self.border :], ids),
        )
