"""Scatter from a root."""

import math

import jax
import jax.numpy as jnp

from jaxcomm.collectives.broadcast import root_index
from jaxcomm.collectives.reduce_scatter import ReduceScatter
from jaxcomm.communicator import replica_groups
from jaxcomm.primitives import define


def scatter(x, axis_name, root=0, *, axis=0, tiled=False, lane=None, backend=None):
    """Gives each device of a mesh axis its slice of the root's ``x``.

    Args:
      x: a pytree of arrays of any shape and dtype, of one shape on all devices; only
        the root's values count. Its leaves travel in one call.
      axis_name: an axis name, or a tuple of names that number the ranks row-major.
      root: the index along the axis of the device that sends.
      axis: the dimension of ``x`` that is cut into one slice a device.
      tiled: keep ``axis``, divided by the axis size, which must divide it. Otherwise
        its size must be the axis size, and it goes away.
      lane: the lane to go through. If None, the default one.
      backend: ``"host"``, ``"nccl"`` or ``"xla"``. If None, what :func:`jaxcomm.init`
        chose for these axes, else the platform's own.

    Returns:
      A pytree of arrays.

    Raises:
      NameError: if the axis is not bound.
      ValueError: if root is not an index along the axis, or the size of ``axis`` does
        not fit.

    Example:
      On a mesh of 2 devices along ``"i"``, with [7, 8] and [0, 0] on them:

      >>> jaxcomm.scatter(x, "i", root=0)  # 7, 8  # doctest: +SKIP
    """
    axes = replica_groups.canonical_axes(axis_name)
    x = define.as_arrays(x, axes, "scatter")
    root = root_index(root, axes, "scatter")
    size = define.group_size(axes)
    dimensions = []
    for leaf in jax.tree.leaves(x):
        d = define.canonical_dimension(axis, jnp.ndim(leaf), "scatter", "axis")
        extent = jnp.shape(leaf)[d]
        if (extent % size if tiled else extent != size) != 0:
            raise ValueError(
                f"scatter: dimension {d} of x has size {extent}, which "
                f"{'is not divisible by' if tiled else 'must be'} the {size} "
                f"devices of axes {axes}"
            )
        dimensions.append(d)
    return define.bind(
        scatter_impl, x, axes, name="scatter", lane=lane, backend=backend, root=root,
        dimensions=tuple(dimensions), tiled=tiled,
    )  # fmt: skip


class Scatter(define.Collective):
    """Parameters: root; dimensions, one for each leaf; tiled."""

    name = "scatter"
    dimension_params = ("dimensions",)

    def shape(self, shape, size, i, *, root, **params):
        return ReduceScatter().shape(shape, size, i, **params)

    def planner_params(self, avals, size, *, root, dimensions, **_):
        outer = [math.prod(a.shape[:d]) for a, d in zip(avals, dimensions, strict=True)]
        return [root, *outer]

    def emulate(self, x, i, *, root, dimensions, tiled):
        d = dimensions[i]
        parts = jnp.stack(jnp.split(x[root], x.shape[0], axis=d))
        return parts if tiled else jnp.squeeze(parts, d + 1)

    def transpose(self, cts, **params):
        from jaxcomm.collectives.gather import gather_p

        return gather_p.bind(*cts, **params)


scatter_impl = Scatter()
scatter_p = define.define(scatter_impl)
