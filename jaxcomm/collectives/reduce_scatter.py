"""Reduce-scatter: psum_scatter."""

import math

import jax
import jax.numpy as jnp

from jaxcomm.collectives.stacked import reduce_stacked
from jaxcomm.primitives import arguments, lax, request
from jaxcomm.primitives.call import AxisIndexGroups, AxisName, PyTree, call_of
from jaxcomm.primitives.collective import Collective, define
from jaxcomm.primitives.request import Request, public
from jaxcomm.primitives.tree import rows_first, widen


@public
def psum_scatter(
    name: str,
    x: PyTree,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: AxisIndexGroups = None,
    tiled: bool = False,
    lane: str | None = None,
    backend: str | None = None,
    reproducible: bool | None = None,
) -> Request:
    """Sum over a mesh axis and leave each device its slice of the sum.

    A twin of ``jax.lax.psum_scatter``. bfloat16, float16 and float8 accumulate in
    float32.

    Args:
      x: a pytree of arrays of any shape and dtype. Its leaves travel in one call.
      axis_name: an axis name, or a tuple of names that number the ranks row-major.
      scatter_dimension: the dimension of ``x`` that is cut into one slice a device.
      axis_index_groups: groups, of one size, to sum within instead. If None, all.
      tiled: keep ``scatter_dimension``, divided by the axis size, which must divide
        it. Otherwise its size must be the axis size, and it goes away.
      lane, backend: to use; see :func:`jaxcomm.init` and :func:`jaxcomm.using`.
      reproducible: as of :func:`jaxcomm.psum`.

    Returns:
      A pytree of arrays.

    Raises:
      NameError: if the axis is not bound.
      TypeError: if tiled is not True or False, or reproducible not one of these or
        None.
      ValueError: if ``scatter_dimension`` does not fit the axis size.

    Example:
      >>> f = jax.shard_map(
      ...     lambda x: jaxcomm.psum_scatter(x, "i", tiled=True),
      ...     in_specs=jax.P(),
      ...     out_specs=jax.P("i"),
      ... )
      >>> f(jnp.arange(4.0))
      Array([ 0.,  4.,  8., 12.], dtype=float32)
    """
    call = call_of(name, axis_name, axis_index_groups, lane, backend, reproducible)
    if not call.axes:
        return Request.ready(REDUCE_SCATTER, call, x)
    tiled = arguments.flag(tiled, f"{call.where}: tiled")
    x = request.as_arrays(x, call)
    dimensions = tuple(
        arguments.split_dimension(
            scatter_dimension, jnp.shape(leaf), tiled, call, "scatter_dimension"
        )
        for leaf in jax.tree.leaves(x)
    )
    return Request(
        REDUCE_SCATTER,
        request.count_bools(x),
        request.summed(x, call),
        dimensions=dimensions,
        tiled=tiled,
    )


def scattered_shape(shape, size, dimension, tiled):
    """Return the shape of what each of ``size`` ranks gets."""
    kept = (shape[dimension] // size,) if tiled else ()
    return (*shape[:dimension], *kept, *shape[dimension + 1 :])


class ReduceScatter(Collective):
    """Parameters: dimensions, one for each leaf; tiled."""

    name = "reduce_scatter"
    dimension_params = ("dimensions",)

    def shape(self, shape, size, i, *, dimensions, tiled):
        return scattered_shape(shape, size, dimensions[i], tiled)

    def planner_params(self, avals, size, *, dimensions, **_):
        return [
            math.prod(aval.shape[:d]) for aval, d in zip(avals, dimensions, strict=True)
        ]

    def emulate(self, x, i, *, dimensions, tiled):
        size, d = x.shape[0], dimensions[i]
        total = reduce_stacked(x, "sum")
        parts = rows_first(total, size, d)
        return parts if tiled else jnp.squeeze(parts, d + 1)

    def xla(self, xs, call, *, dimensions, tiled):
        def scatter(x, d):
            return lax.psum_scatter(
                widen(x),
                call.axes,
                scatter_dimension=d,
                axis_index_groups=call.index_groups,
                tiled=tiled,
            ).astype(x.dtype)

        return list(map(scatter, xs, dimensions))


REDUCE_SCATTER = ReduceScatter()
define(REDUCE_SCATTER)
