"""Barrier."""

import jax
import jax.numpy as jnp

from jaxcomm.primitives import lax, request
from jaxcomm.primitives.call import AxisName, PyTree, call_of
from jaxcomm.primitives.collective import Collective, define
from jaxcomm.primitives.request import Request, public


@public
def pbarrier(
    name: str,
    x: PyTree,
    axis_name: AxisName,
    *,
    lane: str | None = None,
    backend: str | None = None,
) -> Request:
    """Return ``x`` once every device of a mesh axis has got here.

    Computations on the result run after every device has computed ``x``. Nothing is
    copied where XLA can hand the buffers on. XLA has no barrier: ``backend="xla"``
    reads ``x`` twice, and copies it.

    Args:
      x: a pytree of arrays of any shape and dtype.
      axis_name: an axis name or a tuple of names.
      lane, backend: to use; see :func:`jaxcomm.init` and :func:`jaxcomm.using`.

    Returns:
      ``x``. Its gradient passes through a barrier as well.

    Raises:
      NameError: if the axis is not bound.

    Example:
      >>> f = jax.shard_map(
      ...     lambda x: jaxcomm.pbarrier(x, "i"),
      ...     in_specs=jax.P("i"),
      ...     out_specs=jax.P("i"),
      ... )
      >>> f(jnp.arange(4))
      Array([0, 1, 2, 3], dtype=int32)
    """
    call = call_of(name, axis_name, None, lane, backend)
    return Request(BARRIER, request.as_arrays(x, call), call)


class Barrier(Collective):
    """Each result is the operand's own buffer."""

    name = "barrier"

    def aliases(self, num_operands):
        return {i: i for i in range(num_operands)}

    def emulate(self, x, i):
        return x

    def xla(self, xs, call):
        # XLA drops a collective whose result is not used, also by optimization_barrier.
        # So all of every x goes into this one, and its result into every element.
        xs = jax.lax.optimization_barrier(tuple(xs))
        here = sum(
            (jnp.any(x.astype(bool)).astype(jnp.int32) for x in xs), jnp.int32(0)
        )
        is_never = lax.pmax(here, call.axes) < 0
        return [jnp.where(is_never, jnp.zeros_like(x), x) for x in xs]


BARRIER = Barrier()
define(BARRIER)
