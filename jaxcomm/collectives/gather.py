"""Gather to a root."""

import math

import jax
import jax.numpy as jnp

from jaxcomm.collectives.all_gather import AllGather
from jaxcomm.collectives.broadcast import root_index
from jaxcomm.communicator import replica_groups
from jaxcomm.primitives import define


def gather(x, axis_name, root=0, *, axis=0, tiled=False, lane=None, backend=None):
    """Collects ``x`` from all devices of a mesh axis on one of them.

    Args:
      x: a pytree of arrays of any shape and dtype. Its leaves travel in one call.
      axis_name: an axis name, or a tuple of names that number the ranks row-major.
      root: the index along the axis of the device that receives.
      axis: where in the result the ranks are laid out.
      tiled: concatenate along ``axis`` instead of stacking along a new one.
      lane: the lane to go through. If None, the default one.
      backend: ``"host"``, ``"nccl"`` or ``"xla"``. If None, what :func:`jaxcomm.init`
        chose for these axes, else the platform's own.

    Returns:
      A pytree of arrays shaped as by :func:`jaxcomm.all_gather`: everything on the
      root, zeros elsewhere.

    Raises:
      NameError: if the axis is not bound.
      TypeError: if tiled is not True or False.
      ValueError: if root or axis is out of range.

    Example:
      On a mesh of 2 devices along ``"i"``, with ``x`` 7, 8 on them:

      >>> jaxcomm.gather(x, "i", root=1)  # [0, 0], [7, 8]  # doctest: +SKIP
    """
    axes = replica_groups.canonical_axes(axis_name)
    tiled = define.flag(tiled, f"gather over {axes}: tiled")
    x = define.as_arrays(x, axes, "gather")
    root = root_index(root, axes, "gather")
    dimensions = tuple(
        define.canonical_dimension(axis, jnp.ndim(leaf) + (not tiled), "gather", "axis")
        for leaf in jax.tree.leaves(x)
    )
    return define.bind(
        gather_impl, x, axes, name="gather", lane=lane, backend=backend, root=root,
        dimensions=dimensions, tiled=tiled,
    )  # fmt: skip


class Gather(define.Collective):
    """Parameters: root; dimensions, one for each leaf; tiled."""

    name = "gather"
    dimension_params = ("dimensions",)

    def shape(self, shape, size, i, *, root, **params):
        return AllGather().shape(shape, size, i, **params)

    def planner_params(self, avals, size, *, root, dimensions, **_):
        outer = [math.prod(a.shape[:d]) for a, d in zip(avals, dimensions, strict=True)]
        return [root, *outer]

    def emulate(self, x, i, *, root, **params):
        every = AllGather().emulate(x, i, **params)
        return jnp.zeros_like(every).at[root].set(every[root])

    def transpose(self, cts, **params):
        from jaxcomm.collectives.scatter import scatter_p

        return scatter_p.bind(*cts, **params)


gather_impl = Gather()
gather_p = define.define(gather_impl)
