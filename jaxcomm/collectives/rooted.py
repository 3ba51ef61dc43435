"""Collectives with a root: pbroadcast, preduce, pgather, pscatter."""

import math
from typing import Literal

import jax
import jax.numpy as jnp

from jaxcomm.collectives.all_gather import (
    gather_stacked,
    gathered_dimensions,
    gathered_shape,
)
from jaxcomm.collectives.all_reduce import ALL_REDUCE, gathered_jvp
from jaxcomm.collectives.reduce_scatter import scattered_shape
from jaxcomm.collectives.stacked import REDUCERS, reduce_stacked
from jaxcomm.primitives import arguments, lax, request
from jaxcomm.primitives.call import AxisName, PyTree, call_of
from jaxcomm.primitives.collective import Collective, define
from jaxcomm.primitives.request import Request, public

Op = Literal["sum", "prod", "max", "min"]


@public
def pbroadcast(
    name: str,
    x: PyTree,
    axis_name: AxisName,
    source: int,
    *,
    lane: str | None = None,
    backend: str | None = None,
) -> Request:
    """Copy ``x`` from the ``source`` device; a twin of ``jax.lax.pbroadcast``.

    Works on CPU, where ``jax.lax.pbroadcast`` is not implemented.

    Args:
      x: a pytree of arrays of any shape and dtype. Its leaves travel in one call.
      axis_name: an axis name, or a tuple of names that number the ranks row-major.
      source: the index along the axis of the device whose ``x`` all receive.
      lane, backend: to use; see :func:`jaxcomm.init` and :func:`jaxcomm.using`.

    Returns:
      A pytree like ``x``. Its gradient is summed on the source, zero elsewhere.

    Raises:
      NameError: if the axis is not bound.
      ValueError: if ``source`` is not an index along the axis.

    Example:
      >>> f = jax.shard_map(
      ...     lambda x: jaxcomm.pbroadcast(x, "i", 2),
      ...     in_specs=jax.P("i"),
      ...     out_specs=jax.P("i"),
      ... )
      >>> f(jnp.arange(4))
      Array([2, 2, 2, 2], dtype=int32)
    """
    call = call_of(name, axis_name, None, lane, backend)
    source = arguments.root(source, call, "source")
    return Request(BROADCAST, request.as_arrays(x, call), call, root=source)


class Broadcast(Collective):
    """Parameter: root."""

    name = "broadcast"
    replicated = True

    def planner_params(self, avals, size, *, root, **_):
        return [root]

    def emulate(self, x, i, *, root):
        return jnp.broadcast_to(x[root], x.shape)

    def xla(self, xs, call, *, root):
        # jax.lax.pbroadcast is not implemented on every platform. The zeros of the
        # other ranks leave the root's value as it is; -0.0 alone becomes 0.0.
        is_root = jax.lax.axis_index(call.axes) == root

        def send(x):
            if x.dtype == jnp.float8_e8m0fnu:  # It has no zero, and its bits do.
                bits = send(jax.lax.bitcast_convert_type(x, jnp.uint8))
                return jax.lax.bitcast_convert_type(bits, x.dtype)
            masked = jnp.where(is_root, x, jnp.zeros_like(x))
            return lax.psum(masked, call.axes).astype(x.dtype)

        return list(map(send, xs))


BROADCAST = Broadcast()
define(BROADCAST)


@public
def preduce(
    name: str,
    x: PyTree,
    axis_name: AxisName,
    root: int = 0,
    *,
    op: Op = "sum",
    lane: str | None = None,
    backend: str | None = None,
) -> Request:
    """Reduce ``x`` over a mesh axis onto one device.

    Args:
      x: a pytree of arrays of any shape and dtype. Its leaves travel in one call.
      axis_name: an axis name, or a tuple of names that number the ranks row-major.
      root: the index along the axis of the device that receives the result.
      op: ``"sum"``, ``"prod"``, ``"max"`` or ``"min"``; bfloat16, float16 and float8
        accumulate in float32, bool in sums and products counts in int32.
      lane, backend: to use; see :func:`jaxcomm.init` and :func:`jaxcomm.using`.

    Returns:
      A pytree like ``x``: the reduction on the root, zeros elsewhere.

    Raises:
      NameError: if the axis is not bound.
      ValueError: if root is not an index along the axis, or op is none of the four.

    Example:
      >>> f = jax.shard_map(
      ...     lambda x: jaxcomm.preduce(x, "i", root=1),
      ...     in_specs=jax.P("i"),
      ...     out_specs=jax.P("i"),
      ... )
      >>> f(jnp.arange(4))
      Array([0, 6, 0, 0], dtype=int32)
    """
    check_op(name, op)
    call = call_of(name, axis_name, None, lane, backend)
    if op in ("sum", "prod"):
        x = request.count_bools(x)
    root = arguments.root(root, call)
    return Request(REDUCE, request.as_arrays(x, call), call, root=root, op=op)


def check_op(name: str, op) -> None:
    """Raise ValueError unless ``op`` is the name of a reduction."""
    if not isinstance(op, str) or op not in REDUCERS:
        raise ValueError(f"{name}: op must be one of {tuple(REDUCERS)}, got {op!r}")


class Reduce(Collective):
    """Parameters: root, op."""

    name = "reduce"

    def planner_params(self, avals, size, *, root, **_):
        return [root]

    def emulate(self, x, i, *, root, op):
        return jnp.zeros_like(x).at[root].set(reduce_stacked(x, op))

    def xla(self, xs, call, *, root, op):
        is_root = jax.lax.axis_index(call.axes) == root
        totals = ALL_REDUCE.xla(xs, call, op=op)
        return [jnp.where(is_root, total, jnp.zeros_like(total)) for total in totals]

    def jvp(self, primals, tangents, **params):
        if params["op"] == "sum":
            return super().jvp(primals, tangents, **params)
        return gathered_jvp(self, primals, tangents, **params)


REDUCE = Reduce()
define(REDUCE)


@public
def pgather(
    name: str,
    x: PyTree,
    axis_name: AxisName,
    root: int = 0,
    *,
    axis: int = 0,
    tiled: bool = False,
    lane: str | None = None,
    backend: str | None = None,
) -> Request:
    """Collect ``x`` from all devices of a mesh axis on one of them.

    Args:
      x: a pytree of arrays of any shape and dtype. Its leaves travel in one call.
      axis_name: an axis name, or a tuple of names that number the ranks row-major.
      root: the index along the axis of the device that receives.
      axis: where in the result the ranks are laid out.
      tiled: concatenate along ``axis`` instead of stacking along a new one.
      lane, backend: to use; see :func:`jaxcomm.init` and :func:`jaxcomm.using`.

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
    call = call_of(name, axis_name, None, lane, backend)
    tiled = arguments.flag(tiled, f"{call.where}: tiled")
    x = request.as_arrays(x, call)
    root = arguments.root(root, call)
    dimensions = gathered_dimensions(x, axis, tiled, name)
    return Request(GATHER, x, call, root=root, dimensions=dimensions, tiled=tiled)


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


@public
def pscatter(
    name: str,
    x: PyTree,
    axis_name: AxisName,
    root: int = 0,
    *,
    axis: int = 0,
    tiled: bool = False,
    lane: str | None = None,
    backend: str | None = None,
) -> Request:
    """Give each device of a mesh axis its slice of the root's ``x``.

    Args:
      x: a pytree of arrays of any shape and dtype, of one shape on all devices; only
        the root's values count. Its leaves travel in one call.
      axis_name: an axis name, or a tuple of names that number the ranks row-major.
      root: the index along the axis of the device that sends.
      axis: the dimension of ``x`` that is cut into one slice a device.
      tiled: keep ``axis``, divided by the axis size, which must divide it. Otherwise
        its size must be the axis size, and it goes away.
      lane, backend: to use; see :func:`jaxcomm.init` and :func:`jaxcomm.using`.

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
    call = call_of(name, axis_name, None, lane, backend)
    tiled = arguments.flag(tiled, f"{call.where}: tiled")
    x = request.as_arrays(x, call)
    root = arguments.root(root, call)
    dimensions = tuple(
        arguments.split_dimension(axis, jnp.shape(leaf), tiled, call, "axis")
        for leaf in jax.tree.leaves(x)
    )
    return Request(SCATTER, x, call, root=root, dimensions=dimensions, tiled=tiled)


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
