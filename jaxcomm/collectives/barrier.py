"""Barrier."""

import jax
import jax.numpy as jnp

from jaxcomm.primitives import request
from jaxcomm.primitives.call import AxisName, PyTree, call_of
from jaxcomm.primitives.collective import Collective, define
from jaxcomm.primitives.request import Request


def pbarrier(
    x: PyTree,
    axis_name: AxisName,
    *,
    lane: str | None = None,
    backend: str | None = None,
) -> PyTree:
    """Return ``x`` once every device of a mesh axis has got here.

    Computations on the result run after every device has computed ``x``. Nothing is
    copied where XLA can hand the buffers on.

    Args:
      x: a pytree of arrays of any shape and dtype.
      axis_name: an axis name or a tuple of names.
      lane: the lane to use; see :func:`jaxcomm.init` and :func:`jaxcomm.using`.
      backend: the backend to use; see the same functions.

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
    call = call_of("pbarrier", axis_name, lane=lane, backend=backend)
    return Request(BARRIER, request.as_arrays(x, call), call).run()


class Barrier(Collective):
    """Each result is the operand's own buffer."""

    name = "barrier"

    def aliases(self, num_operands):
        return {i: i for i in range(num_operands)}

    def emulate(self, x, i):
        return x

    def xla(self, xs, call):
        everyone = jax.lax.psum(jnp.int32(1), call.axes)
        return list(jax.lax.optimization_barrier((*xs, everyone))[:-1])


BARRIER = Barrier()
define(BARRIER)
