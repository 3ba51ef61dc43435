"""All-gather: every rank collects all keys and values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.attention.kernels.run import Run
from jaxcomm.attention.strategies.gathered import Gathered, may_have_runs
from jaxcomm.attention.strategies.strategy import Cost, Keys, coordinates_of
from jaxcomm.attention.visibility import consecutive
from jaxcomm.collectives.all_gather import all_gather
from jaxcomm.collectives.reduce_scatter import psum_scatter


@dataclasses.dataclass(frozen=True)
class AllGather(Gathered):
    """One collective of all keys and values; backward another, and a reduce-scatter.

    It sends what a ring sends, in one call and before computing. Memory for keys and
    values grows with the number of ranks. The reduce-scatter is in float32.

    Source: Llama team, The Llama 3 Herd of Models, 2024.
    """

    name = "all_gather"

    def cost(self, problem):
        others = problem.size - 1
        return Cost(
            1,
            others * problem.key_bytes,
            others * (problem.key_bytes + problem.key_grad_bytes),
            problem.size * problem.key_bytes,
        )

    def runs(self, call, inputs):
        parts = consecutive(inputs.query_layout)
        whole = (0, call.size * inputs.key_layout.local_length)
        return tuple(Run(part, whole) for part in parts)

    def _is_natural(self, call, inputs):
        """Whether the gathered keys are put into their natural order."""
        return may_have_runs(call, inputs) and bool(self.runs(call, inputs))

    def gather(self, call, inputs, keys):
        leaves, tree = jax.tree.flatten(keys)
        whole = all_gather(leaves, call.axis_name, axis=1, tiled=True)
        if self._is_natural(call, inputs):
            order = np.argsort(inputs.key_layout.all_positions())
            whole = [_in_order(x, order) for x in whole]
        return Keys(*jax.tree.unflatten(tree, whole))

    def positions(self, call, inputs):
        if self._is_natural(call, inputs):
            length = call.size * inputs.key_layout.local_length
            return jax.lax.iota(jnp.int32, length)
        return coordinates_of(inputs.key_layout, 0, call.size).positions

    def segments(self, call, inputs):
        if self._is_natural(call, inputs):
            return (call.size * inputs.key_layout.local_length,)
        return inputs.key_layout.segments * call.size

    def scatter(self, call, inputs, grads):
        if self._is_natural(call, inputs):
            order = inputs.key_layout.all_positions()
            grads = jax.tree.map(lambda x: _in_order(x, order), grads)
        return psum_scatter(grads, call.axis_name, scatter_dimension=1, tiled=True)

    def columns(self, call, inputs, bias):
        return bias

    def add_columns(self, call, inputs, grad_bias):
        return grad_bias


def _in_order(x, order: np.ndarray):
    """Return the tokens of (B, T, ...) in another order, by slices of what is whole."""
    breaks = np.flatnonzero(np.diff(order) != 1) + 1
    parts = np.split(order, breaks)
    return jnp.concatenate([x[:, part[0] : part[-1] + 1] for part in parts], 1)
