"""Halo: each rank receives the border of its neighbours that a window reaches."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.run import Run
from jaxcomm.attention.strategies.gathered import Gathered
from jaxcomm.attention.strategies.strategy import Cost, Keys
from jaxcomm.attention.visibility import Piece, consecutive, pieces
from jaxcomm.collectives.permute import ring_shift


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
                "there is no window: pass local_window_size, and with is_causal=True "
                "its left side counts"
            )
        return None

    def cost(self, problem):
        sends = self._sends(problem, problem)
        held = problem.key_layout.local_length
        tokens = sum(part.stop - part.start for _, of in sends for part in of)
        share = tokens / max(held, 1)
        return Cost(
            len(sends),
            share * problem.key_bytes,
            share * (problem.key_bytes + problem.key_grad_bytes),
            (1 + share) * problem.key_bytes,
        )

    def _sends(self, call, inputs) -> list[tuple[int, list[Piece]]]:
        """Return what is sent by how many ranks it goes further, the farthest first."""
        found = pieces(inputs.query_layout, inputs.key_layout, call.mask)
        by_shift = itertools.groupby(found, lambda piece: piece.shift)
        return [(shift, list(parts)) for shift, parts in by_shift][::-1]

    def _parts(self, call, inputs) -> list[Piece]:
        """Return the gathered keys in their order: a rank's own are the last."""
        parts = [part for _, of in self._sends(call, inputs) for part in of]
        return [*parts, Piece(0, 0, inputs.key_layout.local_length)]

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
            # Pieces of one rank are of different keys.
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
