"""Scatter from a root: pscatter."""

import math

import jax
import jax.numpy as jnp

from jaxcomm.collectives.reduce_scatter import scattered_shape
from jaxcomm.primitives import arguments, request
from jaxcomm.primitives.call import AxisName, PyTree, call_of
from jaxcomm.primitives.collective import Collective, define
from jaxcomm.primitives.request import Request


def pscatter(
    x: PyTree,
    axis_name: AxisName,
    root: int = 0,
    *,
    axis: int = 0,
    tiled: bool = False,
    lane: str | None = None,
    backend: str | None = None,
) -> PyTree:
    """Give each device of a mesh axis its slice of the root's ``x``.

    Args:
      x: a pytree of arrays of any shape and dtype, of one shape on all devices; only
        the root's values count. Its leaves travel in one call.
      axis_name: an axis name, or a tuple of names that number the ranks row-major.
      root: the index along the axis of the device that sends.
      axis: the dimension of ``x`` that is cut into one slice a device.
      tiled: keep ``axis``, divided by the axis size, which must divide it. Otherwise
        its size must be the axis size, and it goes away.
      lane: the lane to use; see :func:`jaxcomm.init` and :func:`jaxcomm.using`.
      backend: the backend to use; see the same functions.

    Returns:
      A pytree of arrays.

    Raises:
      NameError: if the axis is not bound.
      TypeError: if tiled is not True or False.
      ValueError: if root is not an index along the axis, or the size of ``axis`` does
        not fit.

    Example:
      >>> f = jax.shard_map(
      ...     lambda x: jaxcomm.pscatter(x, "i", root=1, tiled=True),
      ...     in_specs=jax.P("i"),
      ...     out_specs=jax.P("i"),
      ... )
      >>> f(jnp.arange(16))
      Array([4, 5, 6, 7], dtype=int32)
    """
    call = call_of("pscatter", axis_name, lane=lane, backend=backend)
    tiled = arguments.flag(tiled, f"{call.where}: tiled")
    x = request.as_arrays(x, call)
    root = arguments.root(root, call)
    size = call.group_size
    dimensions = []
    for leaf in jax.tree.leaves(x):
        d = arguments.canonical_dimension(axis, jnp.ndim(leaf), "pscatter", "axis")
        extent = jnp.shape(leaf)[d]
        if (extent % size if tiled else extent != size) != 0:
            raise ValueError(
                f"pscatter: dimension {d} of x has size {extent}, which "
                f"{'is not divisible by' if tiled else 'must be'} the {size} "
                f"devices of axes {call.axes}"
            )
        dimensions.append(d)
    return Request(
        SCATTER, x, call, root=root, dimensions=tuple(dimensions), tiled=tiled
    ).run()


class Scatter(Collective):
    """Parameters: root; dimensions, one for each leaf; tiled."""

    name = "scatter"
    dimension_params = ("dimensions",)

    def shape(self, shape, size, i, *, root, dimensions, tiled):
        return scattered_shape(shape, size, dimensions[i], tiled)

    def planner_params(self, avals, size, *, root, dimensions, **_):
        outer = [math.prod(a.shape[:d]) for a, d in zip(avals, dimensions, strict=True)]
        return [root, *outer]

    def emulate(self, x, i, *, root, dimensions, tiled):
        d = dimensions[i]
        parts = jnp.stack(jnp.split(x[root], x.shape[0], axis=d))
        return parts if tiled else jnp.squeeze(parts, d + 1)


SCATTER = Scatter()
define(SCATTER)
