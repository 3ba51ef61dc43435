"""Reduce to a root: preduce."""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxcomm.collectives.all_reduce import ALL_REDUCE, gathered_jvp
from jaxcomm.collectives.reducing import REDUCERS, reduce_stacked
from jaxcomm.primitives import arguments, request
from jaxcomm.primitives.call import AxisName, PyTree, call_of
from jaxcomm.primitives.collective import Collective, define
from jaxcomm.primitives.request import Request

Op = Literal["sum", "prod", "max", "min"]


def preduce(
    x: PyTree,
    axis_name: AxisName,
    root: int = 0,
    *,
    op: Op = "sum",
    lane: str | None = None,
    backend: str | None = None,
) -> PyTree:
    """Reduce ``x`` over a mesh axis onto one device.

    Args:
      x: a pytree of arrays of any shape and dtype. Its leaves travel in one call.
      axis_name: an axis name, or a tuple of names that number the ranks row-major.
      root: the index along the axis of the device that receives the result.
      op: ``"sum"``, ``"prod"``, ``"max"`` or ``"min"``; bfloat16, float16 and float8
        accumulate in float32, bool in sums and products counts in int32.
      lane: the lane to use; see :func:`jaxcomm.init` and :func:`jaxcomm.using`.
      backend: the backend to use; see the same functions.

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
    check_op("preduce", op)
    call = call_of("preduce", axis_name, lane=lane, backend=backend)
    if op in ("sum", "prod"):
        x = request.count_bools(x)
    root = arguments.root(root, call)
    return Request(REDUCE, request.as_arrays(x, call), call, root=root, op=op).run()


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
