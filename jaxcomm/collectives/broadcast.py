"""Broadcast from a source: pbroadcast."""

import jax
import jax.numpy as jnp

from jaxcomm.primitives import arguments, request
from jaxcomm.primitives.call import AxisName, PyTree, call_of
from jaxcomm.primitives.collective import Collective, define
from jaxcomm.primitives.request import Request


def pbroadcast(
    x: PyTree,
    axis_name: AxisName,
    source: int,
    *,
    lane: str | None = None,
    backend: str | None = None,
) -> PyTree:
    """Copy ``x`` from the ``source`` device; a twin of ``jax.lax.pbroadcast``.

    Works on CPU, where ``jax.lax.pbroadcast`` is not implemented.

    Args:
      x: a pytree of arrays of any shape and dtype. Its leaves travel in one call.
      axis_name: an axis name, or a tuple of names that number the ranks row-major.
      source: the index along the axis of the device whose ``x`` all receive.
      lane: the lane to use; see :func:`jaxcomm.init` and :func:`jaxcomm.using`.
      backend: the backend to use; see the same functions.

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
    call = call_of("pbroadcast", axis_name, lane=lane, backend=backend)
    source = arguments.root(source, call, "source")
    return Request(BROADCAST, request.as_arrays(x, call), call, root=source).run()


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
            return jax.lax.psum(masked, call.axes).astype(x.dtype)

        return list(map(send, xs))


BROADCAST = Broadcast()
define(BROADCAST)
