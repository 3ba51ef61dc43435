"""All-gather: every rank collects all keys and values."""

import dataclasses

import jax

from jaxcomm.attention.strategies.gathered import Gathered
from jaxcomm.attention.strategies.strategy import Cost, Keys, coordinates_of
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

    def gather(self, call, inputs, keys):
        leaves, tree = jax.tree.flatten(keys)
        whole = all_gather(leaves, call.axis_name, axis=1, tiled=True)
        return Keys(*jax.tree.unflatten(tree, whole))

    def positions(self, call, inputs):
        return coordinates_of(inputs.key_layout, 0, call.size).positions

    def segments(self, call, inputs):
        return inputs.key_layout.segments * call.size

    def scatter(self, call, inputs, grads):
        return psum_scatter(grads, call.axis_name, scatter_dimension=1, tiled=True)

    def columns(self, call, inputs, bias):
        return bias

    def add_columns(self, call, inputs, grad_bias):
        return grad_bias
