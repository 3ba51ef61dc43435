"""All-gather."""

import math
from typing import Literal

import jax
import jax.numpy as jnp

from jaxcomm import compat
from jaxcomm.primitives import arguments, lax, request
from jaxcomm.primitives.call import AxisIndexGroups, AxisName, PyTree, call_of
from jaxcomm.primitives.collective import Collective, define
from jaxcomm.primitives.request import Request, public

To = Literal["varying", "invarying", "reduced"]


@public
def all_gather(
    name: str,
    x: PyTree,
    axis_name: AxisName,
    *,
    axis_index_groups: AxisIndexGroups = None,
    axis: int = 0,
    tiled: bool = False,
    to: To = "varying",
    lane: str | None = None,
    backend: str | None = None,
) -> Request:
    """Collect ``x`` from all devices of a mesh axis; a twin of ``jax.lax.all_gather``.

    Args:
      x: a pytree of arrays of any shape and dtype. Its leaves travel in one call.
      axis_name: an axis name, or a tuple of names that number the ranks row-major.
      axis_index_groups: groups, of one size, to gather within instead. If None, all.
      axis: where in the result the ranks are laid out.
      tiled: concatenate along ``axis`` instead of stacking along a new one.
      to: how the result is typed over the axis. ``"invarying"`` and ``"reduced"``:
        equal on all devices. The gradient of an ``"invarying"`` result is not summed;
        that of a ``"reduced"`` result is unreduced, and summed by a reduce-scatter.
        Without ``check_vma``, jax 0.12 takes both for ``"varying"``, and so do we.
      lane, backend: to use; see :func:`jaxcomm.init` and :func:`jaxcomm.using`.

    Returns:
      A pytree of arrays with a new dimension of the size of the axis at ``axis``, or,
      tiled, with dimension ``axis`` that many times as long.

    Raises:
      NameError: if the axis is not bound.
      NotImplementedError: if groups are given and ``to`` is not ``"varying"``.
      TypeError: if tiled is not True or False.
      ValueError: if ``axis`` is out of range, groups are of unequal sizes, or ``to``
        is none of the above.

    Example:
      >>> f = jax.shard_map(
      ...     lambda x: jaxcomm.all_gather(x, "i", tiled=True, to="invarying"),
      ...     in_specs=jax.P("i"),
      ...     out_specs=jax.P(),
      ... )
      >>> f(jnp.arange(4))
      Array([0, 1, 2, 3], dtype=int32)
    """
    call = call_of(name, axis_name, axis_index_groups, lane, backend)
    if to not in ("varying", "invarying", "reduced"):
        raise ValueError(
            f"{call.where}: to={to!r}; choose one of 'varying', 'invarying' and "
            "'reduced'"
        )
    if not compat.types_gathered_values():
        to = "varying"
    if to != "varying" and call.index_groups is not None:
        raise NotImplementedError(
            f"{call.where}: with axis_index_groups the result differs between groups; "
            f"use to='varying'"
        )
    if not call.axes:
        return Request.ready(ALL_GATHER, call, x)
    tiled = arguments.flag(tiled, f"{call.where}: tiled")
    x = request.as_arrays(x, call)
    _ = call.group_size  # groups are of one size
    dimensions = gathered_dimensions(x, axis, tiled, name)
    if to == "reduced" and not compat.checks_varying_axes():
        raise ValueError(
            f"{call.where}: to='reduced' is a type, which values have only inside "
            f"jax.shard_map(..., check_vma=True)"
        )
    call = call.replace(to=to)
    return Request(ALL_GATHER, x, call, dimensions=dimensions, tiled=tiled)


def gathered_dimensions(x, axis: int, tiled: bool, name: str) -> tuple[int, ...]:
    """Return where the ranks are laid out, for each leaf, counted from the front."""
    return tuple(
        arguments.canonical_dimension(axis, jnp.ndim(leaf) + (not tiled), name, "axis")
        for leaf in jax.tree.leaves(x)
    )


def gathered_shape(shape, size, dimension, tiled):
    """Return the shape of what a rank gets from ``size`` ranks."""
    if tiled:
        return (*shape[:dimension], shape[dimension] * size, *shape[dimension + 1 :])
    return (*shape[:dimension], size, *shape[dimension:])


def gather_stacked(x, dimension, tiled):
    """Return what every rank gets of operands stacked along axis 0."""
    size, *shape = x.shape
    out = jnp.moveaxis(x, 0, dimension)
    out = out.reshape(gathered_shape(tuple(shape), size, dimension, tiled))
    return jnp.broadcast_to(out, (size, *out.shape))


class AllGather(Collective):
    """Parameters: dimensions, one for each leaf; tiled."""

    name = "all_gather"
    replicated = True
    dimension_params = ("dimensions",)

    def shape(self, shape, size, i, *, dimensions, tiled):
        return gathered_shape(shape, size, dimensions[i], tiled)

    def planner_params(self, avals, size, *, dimensions, **_):
        return [
            math.prod(aval.shape[:d]) for aval, d in zip(avals, dimensions, strict=True)
        ]

    def emulate(self, x, i, *, dimensions, tiled):
        return gather_stacked(x, dimensions[i], tiled)

    def xla(self, xs, call, *, dimensions, tiled):
        return [
            lax.all_gather(
                x, call.axes, axis_index_groups=call.index_groups, axis=d, tiled=tiled
            )
            for x, d in zip(xs, dimensions, strict=True)
        ]


ALL_GATHER = AllGather()
define(ALL_GATHER)
