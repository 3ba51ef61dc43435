"""Collectives and what numpy makes of them.

Operands have shape (n, k) on each of n ranks. A model takes those of all ranks, shape
(n, n, k), and returns the results by rank.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jaxcomm


@dataclasses.dataclass(frozen=True)
class Operation:
    """A collective with a choice of root or distance made.

    Attributes:
      call: takes the operand, the axes and keyword options.
      model: takes all operands and returns all results.
    """

    call: Callable[..., Any]
    model: Callable[[np.ndarray], np.ndarray]


def _on_all(reduced):
    return lambda x: np.broadcast_to(reduced(x), x.shape)


def _on_one(root, whole):
    def model(x):
        result = whole(x)
        results = np.zeros((len(x), *result.shape), x.dtype)
        results[root] = result
        return results

    return model


def _sum(x):
    return x.sum(0, dtype=x.dtype)


def _moved(pairs):
    def model(x):
        results = np.zeros_like(x)
        for source, target in pairs:
            results[target] = x[source]
        return results

    return model


def _gathered(x):
    return x.reshape(len(x) * x.shape[1], x.shape[2])


def _ragged(sends):
    """Sends row s of rank r to rank s where ``sends[r, s]``, to be its row r."""
    size = len(sends)
    rows = np.arange(size, dtype=np.int32)

    def call(x, axes, **options):
        me = jax.lax.axis_index(axes)
        return jaxcomm.ragged_all_to_all(
            x, jax.numpy.zeros_like(x), rows, jax.numpy.asarray(sends)[me],
            jax.numpy.full_like(rows, me), jax.numpy.asarray(sends.T)[me],
            axis_name=axes, **options,
        )  # fmt: skip

    return call, lambda x: np.where(
        sends.T[..., None], x.swapaxes(0, 1), x.dtype.type(0)
    )


def operations(size: int, rng: np.random.Generator) -> dict[str, Operation]:
    """Returns every collective for groups of a size, by name.

    Args:
      size: ranks of a group.
      rng: chooses roots, distances and permutations.
    """
    root, shift = int(rng.integers(size)), int(rng.integers(1, size + 1))
    sources, targets = rng.permutation(size), rng.permutation(size)
    # One rank fewer than there are: somebody gets nothing.
    pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))[: size - 1]
    ring = [(rank, (rank + shift) % size) for rank in range(size)]
    ragged, ragged_model = _ragged(rng.integers(2, size=(size, size), dtype=np.int32))
    made = {
        "psum": (jaxcomm.psum, _on_all(_sum)),
        "pmax": (jaxcomm.pmax, _on_all(lambda x: x.max(0))),
        "pmin": (jaxcomm.pmin, _on_all(lambda x: x.min(0))),
        "all_gather": (
            lambda x, axes, **to: jaxcomm.all_gather(x, axes, tiled=True, **to),
            lambda x: np.broadcast_to(_gathered(x), (len(x), *_gathered(x).shape)),
        ),
        "psum_scatter": (jaxcomm.psum_scatter, _sum),
        "all_to_all": (
            lambda x, axes, **to: jaxcomm.all_to_all(x, axes, 0, 0, **to),
            lambda x: x.swapaxes(0, 1),
        ),
        "ppermute": (
            lambda x, axes, **to: jaxcomm.ppermute(x, axes, pairs, **to),
            _moved(pairs),
        ),
        "ring_shift": (
            lambda x, axes, **to: jaxcomm.ring_shift(x, axes, shift, **to),
            _moved(ring),
        ),
        "broadcast": (
            lambda x, axes, **to: jaxcomm.pbroadcast(x, axes, root, **to),
            _on_all(lambda x: x[root]),
        ),
        "reduce": (
            lambda x, axes, **to: jaxcomm.preduce(x, axes, root, **to),
            _on_one(root, _sum),
        ),
        "gather": (
            lambda x, axes, **to: jaxcomm.pgather(x, axes, root, tiled=True, **to),
            _on_one(root, _gathered),
        ),
        "scatter": (
            lambda x, axes, **to: jaxcomm.pscatter(x, axes, root, **to),
            lambda x: x[root],
        ),
        "scan": (jaxcomm.pscan, lambda x: x.cumsum(0, dtype=x.dtype)),
        "barrier": (jaxcomm.pbarrier, lambda x: x),
        "ragged_all_to_all": (ragged, ragged_model),
    }
    return {name: Operation(call, model) for name, (call, model) in made.items()}
