"""Gather to a root: pgather."""

import math

import jax
import jax.numpy as jnp

from jaxcomm.collectives.all_gather import gather_stacked, gathered_shape
from jaxcomm.primitives import arguments, request
from jaxcomm.primitives.call import AxisName, PyTree, call_of
from jaxcomm.primitives.collective import Collective, define
from jaxcomm.primitives.request import Request


def pgather(
    x: PyTree,
    axis_name: AxisName,
    root: int = 0,
    *,
    axis: int = 0,
    tiled: bool = False,
    lane: str | None = None,
    backend: str | None = None,
) -> PyTree:
    """Collect ``x`` from all devices of a mesh axis on one of them.

    Args:
      x: a pytree of arrays of any shape and dtype. Its leaves travel in one call.
      axis_name: an axis name, or a tuple of names that number the ranks row-major.
      root: the index along the axis of the device that receives.
      axis: where in the result the ranks are laid out.
      tiled: concatenate along ``axis`` instead of stacking along a new one.
      lane: the lane to use; see :func:`jaxcomm.init` and :func:`jaxcomm.using`.
      backend: the backend to use; see the same functions.

    Returns:
      A pytree of arrays shaped as by :func:`jaxcomm.all_gather`: everything on the
      root, zeros elsewhere.

    Raises:
      NameError: if the axis is not bound.
      TypeError: if tiled is not True or False.
      ValueError: if root or axis is out of range.

    Example:
      >>> f = jax.shard_map(
      ...     lambda x: jaxcomm.pgather(x, "i", root=1, tiled=True)[None],
      ...     in_specs=jax.P("i"),
      ...     out_specs=jax.P("i"),
      ... )
      >>> f(jnp.arange(4))[:2]
      Array([[0, 0, 0, 0],
             [0, 1, 2, 3]], dtype=int32)
    """
    call = call_of("pgather", axis_name, lane=lane, backend=backend)
    tiled = arguments.flag(tiled, f"{call.where}: tiled")
    x = request.as_arrays(x, call)
    root = arguments.root(root, call)
    dimensions = tuple(
        arguments.canonical_dimension(
            axis, jnp.ndim(leaf) + (not tiled), "pgather", "axis"
        )
        for leaf in jax.tree.leaves(x)
    )
    return Request(GATHER, x, call, root=root, dimensions=dimensions, tiled=tiled).run()


class Gather(Collective):
    """Parameters: root; dimensions, one for each leaf; tiled."""

    name = "gather"
    dimension_params = ("dimensions",)

    def shape(self, shape, size, i, *, root, dimensions, tiled):
        return gathered_shape(shape, size, dimensions[i], tiled)

    def planner_params(self, avals, size, *, root, dimensions, **_):
        outer = [math.prod(a.shape[:d]) for a, d in zip(avals, dimensions, strict=True)]
        return [root, *outer]

    def emulate(self, x, i, *, root, dimensions, tiled):
        every = gather_stacked(x, dimensions[i], tiled)
        return jnp.zeros_like(every).at[root].set(every[root])


GATHER = Gather()
define(GATHER)
