"""Attention with packed documents and with a window, over a ring and on one device."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

import jaxcomm
from bench import devices as on
from bench import roofline
from bench.attention import BACKWARD_WORK, SEQUENCE, SINGLE, Problem, program
from bench.cases import TimedCase
from bench.rows import OURS
from bench.tokens import tokens_of

SUITE = "masks"
DEVICES = (8,)
_DOCUMENTS = 16
# One part of the sequence is a window. Documents divide it too.
PARTS = 64
_SPLIT = jax.P(None, on.AXIS)
_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Way:
    """How the sequence is laid out, and what travels."""

    layout: str
    strategy: str


@dataclasses.dataclass(frozen=True)
class Masked:
    """A causal problem of which a mask leaves a part.

    Attributes:
      problem: its shape.
      documents: of equal length; 1 if it is not packed.
      window: how many tokens a token sees, itself among them; or None.
    """

    problem: Problem
    documents: int = 1
    window: int | None = None

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        return [self.problem.sequence // self.documents] * self.documents

    @property
    def forward_flops(self) -> float:
        """Two products for every query and key that it sees."""
        seen = [
            min(at, self.window or at)
            for length in self.lengths
            for at in range(1, length + 1)
        ]
        shape = self.problem
        return 4.0 * shape.batch * shape.heads * shape.depth * sum(seen)


def cases(
    devices: Sequence[int] = DEVICES, sequence: int = SEQUENCE
) -> Iterator[TimedCase]:
    """Yield documents and a window, forward and with backward, for each mesh.

    Args:
      devices: sizes of the meshes.
      sequence: tokens, a multiple of 64 and of twice every mesh size.
    """
    problem = Problem(sequence)
    window = sequence // PARTS
    kinds = {
        f"{_DOCUMENTS} documents": (
            Masked(problem, documents=_DOCUMENTS),
            {OURS: Way("documents", "ring"), "zigzag": Way("zigzag", "ring")},
        ),
        f"a window of {window}": (
            Masked(problem, window=window),
            {OURS: Way("contiguous", "halo"), "ring": Way("contiguous", "ring")},
        ),
    }
    for count in devices:
        for name, (masked, ways) in kinds.items():
            for with_backward in (False, True):
                factor = BACKWARD_WORK if with_backward else 1.0
                yield TimedCase(
                    suite=SUITE,
                    name=name + (", forward + backward" if with_backward else ""),
                    devices=count,
                    detail=f"causal {problem}",
                    unit=roofline.FLOP,
                    work=factor * masked.forward_flops,
                    tolerance=_TOLERANCE,
                    build=functools.partial(_build, masked, ways, count, with_backward),
                    align=functools.partial(_align, masked, ways, count),
                )


def _layout(masked: Masked, way: Way, size: int) -> jaxcomm.Layout:
    if way.layout == "documents":
        return jaxcomm.attention.document_layout(masked.lengths, size)
    return jaxcomm.Layout(way.layout, size, masked.problem.sequence)


def _attend(masked: Masked, way: Way, layout: jaxcomm.Layout) -> Callable:
    """Return attention of one rank's queries, keys and values."""
    window = None if masked.window is None else (masked.window - 1, 0)
    ids = None
    if masked.documents > 1:
        ids = jaxcomm.attention.segment_ids_of(masked.lengths)

    def local(query, key, value):
        return jaxcomm.ring_attention(
            query,
            key,
            value,
            on.AXIS,
            tokens_of(layout, on.AXIS, ids),
            is_causal=True,
            local_window_size=window,
            strategy=way.strategy,
        )

    return local


def _build(masked: Masked, ways: dict[str, Way], count: int, with_backward: bool):
    natural = [on.normal(masked.problem.shape, seed) for seed in range(4)]

    def variant(way, size):
        layout = _layout(masked, way, size)
        arrays, _ = layout.reorder(natural)
        local = _attend(masked, way, layout)
        mesh = on.mesh_of(size)
        placed = [on.place(x, mesh, _SPLIT) for x in arrays]
        return functools.partial(jax.jit(program(local, mesh, with_backward)), *placed)

    found = {name: variant(way, count) for name, way in ways.items()}
    return found | {SINGLE: variant(Way("contiguous", "ring"), 1)}


def _align(masked: Masked, ways: dict[str, Way], count: int, name: str, result):
    """Bring a result into natural order."""
    result = jax.tree.map(np.asarray, result)
    if name == SINGLE:
        return result
    layout = _layout(masked, ways[name], count)
    _, tokens = layout.reorder(np.empty((1, layout.length)))
    return tokens.restore(result)
