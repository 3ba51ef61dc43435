"""Prefix reductions over ranks."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.collectives.all_reduce import REDUCERS, gathered_jvp, reduce_stacked
from jaxcomm.communicator import replica_groups
from jaxcomm.primitives import define


def scan(
    x, axis_name, *, op="sum", exclusive=False, reverse=False, lane=None, backend=None
):
    """Reduces ``x`` over the devices up to and including each; MPI's scan and exscan.

    Args:
      x: a pytree of arrays of any shape and dtype. Its leaves travel in one call.
      axis_name: an axis name, or a tuple of names that number the ranks row-major.
      op: ``"sum"``, ``"prod"``, ``"max"`` or ``"min"``; bfloat16, float16 and float8
        accumulate in float32, bool in sums and products counts in int32.
      exclusive: leave out the device's own value. The first device then gets the
        identity of ``op``: 0, 1, or the least or greatest value of the type.
      reverse: count from the last device.
      lane: the lane to go through. If None, the default one.
      backend: ``"host"``, ``"nccl"`` or ``"xla"``. If None, what :func:`jaxcomm.init`
        chose for these axes, else the platform's own.

    Returns:
      A pytree like ``x``.

    Raises:
      NameError: if the axis is not bound.
      TypeError: if exclusive or reverse is not True or False.
      ValueError: if op is none of the four.

    Example:
      On a mesh of 4 devices along ``"i"``, with ``x`` 1, 2, 3, 4 on them:

      >>> jaxcomm.scan(x, "i")  # 1, 3, 6, 10  # doctest: +SKIP
      >>> jaxcomm.scan(x, "i", exclusive=True)  # 0, 1, 3, 6  # doctest: +SKIP
    """
    if not isinstance(op, str) or op not in REDUCERS:
        raise ValueError(f"scan: op must be one of {tuple(REDUCERS)}, got {op!r}")
    if op in ("sum", "prod"):
        x = define.count_bools(x)
    axes = replica_groups.canonical_axes(axis_name)
    exclusive = define.flag(exclusive, f"scan over {axes}: exclusive")
    reverse = define.flag(reverse, f"scan over {axes}: reverse")
    out = define.bind(
        scan_impl, x, axes, name="scan", lane=lane, backend=backend, op=op,
        exclusive=exclusive, reverse=reverse,
    )  # fmt: skip
    if not exclusive or op in ("sum", "prod"):
        return out
    first = define.group_size(axes) - 1 if reverse else 0
    is_first = jax.lax.axis_index(axes) == first

    def with_identity(leaf):
        # A type that travelled in a wider one has extremes of its own.
        if not define.has_carrier(leaf.dtype):
            return leaf
        return jnp.where(
            is_first, jnp.asarray(identity(op, leaf.dtype), leaf.dtype), leaf
        )

    return jax.tree.map(with_identity, out)


class Scan(define.Collective):
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

    def transpose(self, cts, *, reverse, **params):
        return self.primitive.bind(*cts, reverse=not reverse, **params)

    def jvp(self, primals, tangents, **params):
        if params["op"] == "sum":
            return super().jvp(primals, tangents, **params)
        return gathered_jvp(self, primals, tangents, **params)


def identity(op: str, dtype):
    """Returns the value that changes nothing under ``op``."""
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


scan_impl = Scan()
scan_p = define.define(scan_impl)
