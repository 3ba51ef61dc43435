"""The forward and the backward pass over layers whose parameters are split.

Both are loops that carry the gathered parameters of one layer, and gather the next
layer's meanwhile. ``jax.grad`` of such a loop would keep what it carries for every
layer. The backward pass is therefore written here, and keeps the layers' inputs alone.

A handle cannot be carried by a loop. A layer's gradients are therefore summed while the
rest of its backward pass computes, each as soon as it is there.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxcomm import compat
from jaxcomm.collectives.all_gather import ALL_GATHER
from jaxcomm.collectives.reduce_scatter import REDUCE_SCATTER
from jaxcomm.primitives.call import Call
from jaxcomm.primitives.handle import Handle
from jaxcomm.primitives.request import Request

Arrays = Sequence[jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Layers:
    """A scan over layers, as known when it is traced.

    Attributes:
      compute: ``compute(consts, x, weights, whole)`` of one layer, each of them a list
        of arrays. It returns the next ``x`` and the layer's outputs, two more lists.
      count: the number of layers.
      call: of the collectives: their axes, lane and backend.
      dimensions: where each of a layer's split parameters is split.
    """

    compute: Callable[..., tuple[Arrays, Arrays]]
    count: int
    call: Call
    dimensions: tuple[int, ...]

    def gather(self, split: Arrays, i) -> Handle:
        """Begin to gather the parameters of layer ``i``."""
        mine = [jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for x in split]
        call = self.call.replace(name="all_gather")
        return Request(
            ALL_GATHER, mine, call, dimensions=self.dimensions, tiled=True
        ).start()

    def scatter(self, gradients: list) -> list[Handle | None]:
        """Begin to sum gradients over the devices; each keeps its part of the sums.

        One call for each, since no two are there at the same time.
        """
        call = self.call.replace(name="psum_scatter")

        def start(x, dimension):
            return Request(
                REDUCE_SCATTER, x, call, dimensions=(dimension,), tiled=True
            ).start()

        return [
            None if x is None else start(x, dimension)
            for x, dimension in zip(gradients, self.dimensions, strict=True)
        ]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(layers: Layers, consts: Arrays, init: Arrays, split: Arrays, whole: Arrays):
    """Compute all layers.

    Args:
      layers: which.
      consts: arrays that all layers use.
      init: of the first layer.
      split: parameters (layers, ...) of which each device holds a part.
      whole: parameters (layers, ...) that each device holds.

    Returns:
      The ``x`` of the last layer, and the outputs of all layers, stacked.
    """
    out, (_, ys) = _forward(layers, consts, init, split, whole, keeps_inputs=False)
    return out, ys


def _forward(layers: Layers, consts, init, split, whole, *, keeps_inputs: bool):
    """Compute all layers.

    Returns:
      The ``x`` of the last layer, then stacked inputs, or None, and outputs.
    """

    def step(carry, given):
        x, weights = carry
        i, mine = given
        # The last layer gathers itself again: a branch could not overlap.
        arriving = layers.gather(split, jnp.minimum(i + 1, layers.count - 1))
        out, ys = layers.compute(consts, arriving.then(x), weights, mine)
        weights = arriving.done(after=(out, ys))
        return (out, weights), (x if keeps_inputs else None, ys)

    weights = layers.gather(split, 0).done()
    (out, _), outs = jax.lax.scan(
        step,
        (init, weights),
        (jnp.arange(layers.count), whole),
    )
    return out, outs


def _run_forward(layers: Layers, consts, init, split, whole):
    out, (inputs, ys) = _forward(layers, consts, init, split, whole, keeps_inputs=True)
    return (out, ys), (consts, inputs, split, whole)


def _run_backward(layers: Layers, residuals, cts):
    consts, inputs, split, whole = residuals
    ct_out, ct_ys = _inexact(cts)

    def step(carry, given):
        ct, ct_consts, weights = carry
        i, x, mine, ct_y = given
        arriving = layers.gather(split, jnp.maximum(i - 1, 0))
        pullback = _pullback_of(layers, (consts, arriving.then(x), weights, mine))
        ((more, ct, full, ct_mine),) = pullback((ct, ct_y))
        parts = [
            None if leaving is None else leaving.done(after=ct)
            for leaving in layers.scatter(full)
        ]
        weights = arriving.done(after=(ct, parts))
        ct_consts = jax.tree.map(jnp.add, ct_consts, more)
        return (ct, ct_consts, weights), (parts, ct_mine)

    weights = layers.gather(split, layers.count - 1).done()
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    (ct, ct_consts, _), (gradients, ct_whole) = jax.lax.scan(
        step,
        (ct_out, zeros(_inexact(consts)), weights),
        (jnp.arange(layers.count), inputs, whole, ct_ys),
        reverse=True,
    )
    return ct_consts, ct, gradients, ct_whole


run.defvjp(_run_forward, _run_backward)


def _pullback_of(layers: Layers, arguments):
    """Return what makes gradients of those of one layer's results.

    Integers have no gradients: both have None in their places.
    """

    def of_inexact(moving):
        given = jax.tree.map(
            lambda x, other: other if x is None else x,
            moving,
            arguments,
            is_leaf=lambda x: x is None,
        )
        return _inexact(layers.compute(*given))

    return jax.vjp(of_inexact, _inexact(arguments))[1]


def _inexact(arrays):
    """Return the arrays, with None for those without gradients."""
    return jax.tree.map(lambda x: x if compat.has_tangent(x) else None, arrays)
