"""Reduce to a root."""

import jax
import jax.numpy as jnp

from jaxcomm.collectives.all_reduce import (
    REDUCERS,
    all_reduce,
    gathered_jvp,
    reduce_stacked,
)
from jaxcomm.collectives.broadcast import root_index
from jaxcomm.communicator import replica_groups
from jaxcomm.primitives import define


def reduce(x, axis_name, root=0, *, op="sum", lane=None, backend=None):
    """Reduces ``x`` over a mesh axis onto one device.

    Args:
      x: a pytree of arrays of any shape and dtype. Its leaves travel in one call.
      axis_name: an axis name, or a tuple of names that number the ranks row-major.
      root: the index along the axis of the device that receives the result.
      op: ``"sum"``, ``"prod"``, ``"max"`` or ``"min"``; bfloat16, float16 and float8
        accumulate in float32, bool in sums and products counts in int32.
      lane: the lane to go through. If None, the default one.
      backend: ``"host"``, ``"nccl"`` or ``"xla"``. If None, what :func:`jaxcomm.init`
        chose for these axes, else the platform's own.

    Returns:
      A pytree like ``x``: the reduction on the root, zeros elsewhere.

    Raises:
      NameError: if the axis is not bound.
      ValueError: if root is not an index along the axis, or op is none of the four.

    Example:
      On a mesh of 4 devices along ``"i"``, with ``x`` 0, 1, 2, 3 on them:

      >>> jaxcomm.reduce(x, "i", root=1)  # 0, 6, 0, 0  # doctest: +SKIP
    """
    if not isinstance(op, str) or op not in REDUCERS:
        raise ValueError(f"reduce: op must be one of {tuple(REDUCERS)}, got {op!r}")
    axes = replica_groups.canonical_axes(axis_name)
    if op in ("sum", "prod"):
        x = define.count_bools(x)
    return define.bind(
        reduce_impl, x, axes, name="reduce", lane=lane, backend=backend,
        root=root_index(root, axes, "reduce"), op=op,
    )  # fmt: skip


class Reduce(define.Collective):
    """Parameters: root, op."""

    name = "reduce"

    def planner_params(self, avals, size, *, root, **_):
        return [root]

    def emulate(self, x, i, *, root, op):
        return jnp.zeros_like(x).at[root].set(reduce_stacked(x, op))

    def xla(self, xs, axes, index_groups, *, root, op):
        is_root = jax.lax.axis_index(axes) == root
        totals = all_reduce.xla(xs, axes, index_groups, op=op)
        return [jnp.where(is_root, total, jnp.zeros_like(total)) for total in totals]

    def transpose(self, cts, *, op, **params):
        from jaxcomm.collectives.broadcast import broadcast_p

        return broadcast_p.bind(*cts, **params)

    def jvp(self, primals, tangents, **params):
        if params["op"] == "sum":
            return super().jvp(primals, tangents, **params)
        return gathered_jvp(self, primals, tangents, **params)


reduce_impl = Reduce()
reduce_p = define.define(reduce_impl)
