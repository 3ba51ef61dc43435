"""Reduce-scatter: psum_scatter."""

import math

import jax
import jax.numpy as jnp

from jaxcomm.collectives.all_reduce import reduce_stacked, widen
from jaxcomm.communicator import replica_groups
from jaxcomm.primitives import define


def psum_scatter(
    x, axis_name, *, scatter_dimension=0, axis_index_groups=None, tiled=False,
    lane=None, backend=None,
):  # fmt: skip
    """Sums over a mesh axis and leaves each device its slice of the sum.

    A twin of ``jax.lax.psum_scatter``. bfloat16, float16 and float8 accumulate in
    float32.

    Args:
      x: a pytree of arrays of any shape and dtype. Its leaves travel in one call.
      axis_name: an axis name, or a tuple of names that number the ranks row-major.
      scatter_dimension: the dimension of ``x`` that is cut into one slice a device.
      axis_index_groups: groups, of one size, to sum within instead. If None, all.
      tiled: keep ``scatter_dimension``, divided by the axis size, which must divide
        it. Otherwise its size must be the axis size, and it goes away.
      lane: the lane to go through. If None, the default one.
      backend: ``"host"``, ``"nccl"`` or ``"xla"``. If None, what :func:`jaxcomm.init`
        chose for these axes, else the platform's own.

    Returns:
      A pytree of arrays.

    Raises:
      NameError: if the axis is not bound.
      TypeError: if tiled is not True or False.
      ValueError: if ``scatter_dimension`` does not fit the axis size.

    Example:
      On a mesh of 4 devices along ``"i"``, with ``x`` = [0, 1, 2, 3] on each:

      >>> jaxcomm.psum_scatter(x, "i")  # 0, 4, 8, 12 on the devices  # doctest: +SKIP
    """
    return scatter_sum(
        "psum_scatter", x, axis_name, scatter_dimension, axis_index_groups, tiled, lane,
        backend,
    )  # fmt: skip


def scatter_sum(
    name: str, x, axis_name, scatter_dimension, axis_index_groups, tiled, lane, backend,
    bind=define.bind,
):  # fmt: skip
    """Checks a reduce-scatter and hands it to ``bind``, for the function ``name``."""
    axes = replica_groups.canonical_axes(axis_name)
    if not axes:
        return x
    tiled = define.flag(tiled, f"{name} over {axes}: tiled")
    x = define.as_arrays(x, axes, name)
    index_groups = define.index_groups_of(axes, axis_index_groups, name)
    size = define.group_size(axes, index_groups)
    dimensions = []
    for leaf in jax.tree.leaves(x):
        d = define.canonical_dimension(
            scatter_dimension, jnp.ndim(leaf), name, "scatter_dimension"
        )
        extent = jnp.shape(leaf)[d]
        if tiled and extent % size != 0:
            raise ValueError(
                f"{name}: dimension {d} of x has size {extent}, not divisible by "
                f"the {size} devices of axes {axes}. Pad x or choose another "
                f"scatter_dimension."
            )
        if not tiled and extent != size:
            raise ValueError(
                f"{name}: dimension {d} of x has size {extent}, but axes {axes} "
                f"have {size} devices. They must be equal, or pass tiled=True."
            )
        dimensions.append(d)
    return bind(
        reduce_scatter, define.count_bools(x), axes, name=name,
        index_groups=index_groups, lane=lane, backend=backend,
        dimensions=tuple(dimensions), tiled=tiled,
    )  # fmt: skip


class ReduceScatter(define.Collective):
    """Parameters: dimensions, one for each leaf; tiled."""

    name = "reduce_scatter"
    dimension_params = ("dimensions",)

    def shape(self, shape, size, i, *, dimensions, tiled):
        d = dimensions[i]
        kept = (shape[d] // size,) if tiled else ()
        return (*shape[:d], *kept, *shape[d + 1 :])

    def planner_params(self, avals, size, *, dimensions, **_):
        return [
            math.prod(aval.shape[:d]) for aval, d in zip(avals, dimensions, strict=True)
        ]

    def emulate(self, x, i, *, dimensions, tiled):
        size, d = x.shape[0], dimensions[i]
        total = reduce_stacked(x, "sum")
        parts = total.reshape(*total.shape[:d], size, -1, *total.shape[d + 1 :])
        parts = jnp.moveaxis(parts, d, 0)
        return parts if tiled else jnp.squeeze(parts, d + 1)

    def xla(self, xs, axes, index_groups, *, dimensions, tiled):
        return [
            jax.lax.psum_scatter(
                widen(x), axes, scatter_dimension=d, axis_index_groups=index_groups,
                tiled=tiled,
            ).astype(x.dtype)
            for x, d in zip(xs, dimensions, strict=True)
        ]  # fmt: skip

    def dual(self, **params):
        from jaxcomm.collectives.all_gather import all_gather_impl

        return all_gather_impl, params


reduce_scatter = ReduceScatter()
reduce_scatter_p = define.define(reduce_scatter)
