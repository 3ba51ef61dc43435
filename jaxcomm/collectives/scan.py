"""Prefix reductions over ranks: pscan."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.collectives.all_reduce import gathered_jvp
from jaxcomm.collectives.rooted import Op, check_op
from jaxcomm.collectives.stacked import reduce_stacked
from jaxcomm.primitives import arguments, request
from jaxcomm.primitives.call import AxisName, PyTree, call_of
from jaxcomm.primitives.collective import Collective, define
from jaxcomm.primitives.request import Request


def pscan(
    x: PyTree,
    axis_name: AxisName,
    *,
    op: Op = "sum",
    exclusive: bool = False,
    reverse: bool = False,
    lane: str | None = None,
    backend: str | None = None,
) -> PyTree:
    """Reduce ``x`` over the devices up to and including each; MPI's scan and exscan.

    Args:
      x: a pytree of arrays of any shape and dtype. Its leaves travel in one call.
      axis_name: an axis name, or a tuple of names that number the ranks row-major.
      op: ``"sum"``, ``"prod"``, ``"max"`` or ``"min"``; bfloat16, float16 and float8
        accumulate in float32, bool in sums and products counts in int32.
      exclusive: leave out the device's own value. The first device then gets the
        identity of ``op``: 0, 1, or the least or greatest value of the type.
      reverse: count from the last device.
      lane, backend: to use; see :func:`jaxcomm.init` and :func:`jaxcomm.using`.

    Returns:
      A pytree like ``x``.

    Raises:
      NameError: if the axis is not bound.
      TypeError: if exclusive or reverse is not True or False, or an exclusive sum is of
        a type without zero.
      ValueError: if op is none of the four.

    Example:
      >>> f = jax.shard_map(
      ...     lambda x: jaxcomm.pscan(x, "i"), in_specs=jax.P("i"), out_specs=jax.P("i")
      ... )
      >>> f(jnp.arange(1, 5))
      Array([ 1,  3,  6, 10], dtype=int32)
    """
    check_op("pscan", op)
    call = call_of("pscan", axis_name, lane=lane, backend=backend)
    if op in ("sum", "prod"):
        x = request.count_bools(x)
    exclusive = arguments.flag(exclusive, f"{call.where}: exclusive")
    reverse = arguments.flag(reverse, f"{call.where}: reverse")
    x = request.as_arrays(x, call)
    if exclusive and op == "sum":
        _check_zero(x, call)
    out = Request(SCAN, x, call, op=op, exclusive=exclusive, reverse=reverse).run()
    if not exclusive or op in ("sum", "prod"):
        return out
    first = call.group_size - 1 if reverse else 0
    is_first = jax.lax.axis_index(call.axes) == first

    def with_identity(leaf):
        # A type that travelled in a wider one has extremes of its own.
        if not request.has_carrier(leaf.dtype):
            return leaf
        return jnp.where(
            is_first, jnp.asarray(identity(op, leaf.dtype), leaf.dtype), leaf
        )

    return jax.tree.map(with_identity, out)


def _check_zero(x, call):
    """Raise TypeError if a leaf is of a type without zero: the sum of nothing."""
    for leaf in jax.tree.leaves(x):
        if leaf.dtype.name == "float8_e8m0fnu":
            raise TypeError(
                f"{call.where}: x has dtype {leaf.dtype}, which has no zero for the "
                f"rank with nothing before it; cast x to bfloat16 first"
            )


class Scan(Collective):
    """Parameters: op, exclusive, reverse."""

    name = "scan"

    def planner_params(self, avals, size, *, exclusive, reverse, **_):
        return [int(exclusive), int(reverse)]

    def emulate(self, x, i, *, op, exclusive, reverse):
        size = x.shape[0]
        order = range(size - 1, -1, -1) if reverse else range(size)
        outs, seen = {}, []
        for rank in order:
            if not exclusive:
                seen.append(x[rank])
            outs[rank] = (
                reduce_stacked(jnp.stack(seen), op)
                if seen
                else jnp.full_like(x[rank], identity(op, x.dtype))
            )
            if exclusive:
                seen.append(x[rank])
        return jnp.stack([outs[rank] for rank in range(size)])

    def jvp(self, primals, tangents, **params):
        if params["op"] == "sum":
            return super().jvp(primals, tangents, **params)
        return gathered_jvp(self, primals, tangents, **params)


def identity(op: str, dtype):
    """Return the value that changes nothing under ``op``."""
    if op in ("sum", "prod"):
        return 0 if op == "sum" else 1
    sign = -1 if op == "max" else 1
    if dtype == jnp.bool_:
        return op == "min"
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return info.min if op == "max" else info.max
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return complex(sign * jnp.inf, sign * jnp.inf)
    info = jnp.finfo(dtype)
    if np.isinf(np.asarray(np.inf).astype(dtype)):
        return sign * np.inf
    return info.min if op == "max" else info.max


SCAN = Scan()
define(SCAN)
