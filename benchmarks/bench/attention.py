"""Causal attention over a sequence split across devices, in four ways."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

import jaxcomm
from bench import devices as on
from bench import roofline, targets
from bench.cases import TimedCase
from bench.gathered_attention import gathered_attention
from bench.rows import OURS
from bench.tokens import tokens_of

SUITE = "attention"
DEVICES = (8,)
SEQUENCE = 16384
XLA_RING = "ring over lax.ppermute"
GATHERED = "all-gather of K and V"
SINGLE = "one device, our tiles"
DENSE = "one device, jax.nn"
_SCHEDULE = "zigzag"
_SPLIT = jax.P(None, on.AXIS)
# Seven products instead of two: the backward pass forms the scores anew.
BACKWARD_WORK = 3.5
# The scores of all heads at once; XLA holds several arrays of this size.
_MOST_DENSE_BYTES = 1 << 30
# Float32 softmax and sums over up to 16384 keys in another order.
_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Problem:
    """The shape of the attention; B, H and D are fixed.

    Attributes:
      sequence: tokens of the whole sequence.
      batch: sequences.
      heads: of query, key and value.
      depth: of a head.
    """

    sequence: int
    batch: int = 1
    heads: int = 4
    depth: int = 64

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of query, key, value and output: batch, tokens, heads, depth."""
        return self.batch, self.sequence, self.heads, self.depth

    @property
    def forward_flops(self) -> float:
        """Two products for every query and key that it sees."""
        pairs = self.sequence * (self.sequence + 1) / 2
        return 4.0 * self.batch * self.heads * self.depth * pairs

    def __str__(self) -> str:
        return f"B{self.batch} H{self.heads} D{self.depth} S{self.sequence}"


def cases(
    devices: Sequence[int] = DEVICES, sequence: int = SEQUENCE
) -> Iterator[TimedCase]:
    """Yield the forward pass and forward with backward, for each mesh.

    Args:
      devices: sizes of the meshes.
      sequence: tokens, a multiple of twice every mesh size.
    """
    problem = Problem(sequence)
    is_judged = sequence == SEQUENCE
    for count in devices:
        for name, factor, target, with_backward in (
            ("forward", 1.0, targets.FORWARD, False),
            ("forward + backward", BACKWARD_WORK, targets.FORWARD_AND_BACKWARD, True),
        ):
            yield TimedCase(
                suite=SUITE,
                name=name,
                devices=count,
                detail=f"causal {problem} {_SCHEDULE}",
                unit=roofline.FLOP,
                work=factor * problem.forward_flops,
                target=target if is_judged and count == 8 else None,
                tolerance=_TOLERANCE,
                build=functools.partial(_build, problem, count, with_backward),
                align=functools.partial(_align, count),
            )


def attend(backend: str | None) -> Callable:
    """Return ring attention over the ring axis by that backend."""

    def local(query, key, value):
        size = jax.lax.axis_size(on.AXIS)
        layout = jaxcomm.Layout(_SCHEDULE, size, size * query.shape[1])
        return jaxcomm.ring_attention(
            query,
            key,
            value,
            on.AXIS,
            tokens_of(layout, on.AXIS),
            is_causal=True,
            backend=backend,
        )

    return local


def program(local: Callable, mesh: jax.sharding.Mesh, with_backward: bool) -> Callable:
    """Return the function to jit: of query, key, value and the gradient of the output.

    Args:
      local: computes attention from one rank's blocks.
      mesh: of the ring.
      with_backward: whether it returns the gradients of query, key and value too.
    """
    mapped = jax.shard_map(local, mesh=mesh, in_specs=_SPLIT, out_specs=_SPLIT)

    def forward(query, key, value, grad_out):
        return (mapped(query, key, value),)

    def both(query, key, value, grad_out):
        out, transpose = jax.vjp(mapped, query, key, value)
        return out, *transpose(grad_out)

    return both if with_backward else forward


def _deal(x, count):
    """Put the tokens of numpy arrays into the order of a ring."""
    length = jax.tree.leaves(x)[0].shape[1]
    layout = jaxcomm.Layout(_SCHEDULE, count, length)
    return layout.reorder(jax.tree.map(np.asarray, x))[0]


def _align(count, name, result):
    return _deal(result, count) if name in (SINGLE, DENSE) else result


def _build(problem, count, with_backward):
    natural = [on.normal(problem.shape, seed) for seed in range(4)]
    dealt = _deal(natural, count)

    def variant(local, arrays, size):
        mesh = on.mesh_of(size)
        placed = [on.place(x, mesh, _SPLIT) for x in arrays]
        compiled = jax.jit(program(local, mesh, with_backward))
        return functools.partial(compiled, *placed)

    gathered = functools.partial(
        gathered_attention, axis_name=on.AXIS, schedule=_SCHEDULE
    )
    variants = {
        OURS: variant(attend(None), dealt, count),
        XLA_RING: variant(attend("xla"), dealt, count),
        GATHERED: variant(gathered, dealt, count),
        SINGLE: variant(attend(None), natural, 1),
    }
    if problem.batch * problem.heads * problem.sequence**2 * 4 <= _MOST_DENSE_BYTES:
        dense = functools.partial(jax.nn.dot_product_attention, is_causal=True)
        variants[DENSE] = variant(dense, natural, 1)
    return variants
