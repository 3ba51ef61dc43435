"""Barrier."""

import jax

from jaxcomm.communicator import replica_groups
from jaxcomm.primitives import define


def barrier(x, axis_name, *, lane=None, backend=None):
    """Returns ``x`` once every device of a mesh axis has got here.

    What is computed from the result happens after every device has computed ``x``.
    Copies nothing where XLA can hand the buffers on.

    Args:
      x: a pytree of arrays of any shape and dtype.
      axis_name: an axis name or a tuple of names.
      lane: the lane to go through. If None, the default one.
      backend: ``"host"``, ``"nccl"`` or ``"xla"``. If None, what :func:`jaxcomm.init`
        chose for these axes, else the platform's own.

    Returns:
      ``x``. Its gradient passes through a barrier as well.

    Raises:
      NameError: if the axis is not bound.

    Example:
      >>> x = jaxcomm.barrier(x, "i")  # doctest: +SKIP
    """
    axes = replica_groups.canonical_axes(axis_name)
    return define.bind(
        barrier_impl, x, axes, name="barrier", lane=lane, backend=backend
    )


class Barrier(define.Collective):
    """Each result is the operand's own buffer."""

    name = "barrier"

    def aliases(self, num_operands):
        return {i: i for i in range(num_operands)}

    def emulate(self, x, i):
        return x

    def xla(self, xs, axes, index_groups):
        everyone = jax.lax.psum(jax.numpy.int32(1), axes)
        return list(jax.lax.optimization_barrier((*xs, everyone))[:-1])

    def transpose(self, cts, **params):
        return self.primitive.bind(*cts, **params)


barrier_impl = Barrier()
barrier_p = define.define(barrier_impl)
