"""Broadcast: broadcast, pbroadcast."""

import jax
import jax.numpy as jnp

from jaxcomm import compat
from jaxcomm.communicator import replica_groups
from jaxcomm.primitives import define


def broadcast(x, axis_name, root=0, *, lane=None, backend=None):
    """Gives every device of a mesh axis the root's ``x``.

    Args:
      x: a pytree of arrays of any shape and dtype. Its leaves travel in one call.
      axis_name: an axis name, or a tuple of names that number the ranks row-major.
      root: the index along the axis of the device whose ``x`` all receive.
      lane: the lane to go through. If None, the default one.
      backend: ``"host"``, ``"nccl"`` or ``"xla"``. If None, what :func:`jaxcomm.init`
        chose for these axes, else the platform's own.

    Returns:
      A pytree like ``x``. Its gradient is summed on the root, zero elsewhere.

    Raises:
      NameError: if the axis is not bound.
      ValueError: if root is not an index along the axis.

    Example:
      On a mesh of 4 devices along ``"i"``, with ``x`` 0, 1, 2, 3 on them:

      >>> jaxcomm.broadcast(x, "i", root=2)  # 2, 2, 2, 2  # doctest: +SKIP
    """
    return _broadcast("broadcast", "root", x, axis_name, root, lane, backend)


def pbroadcast(x, axis_name, source, *, lane=None, backend=None):
    """Copies ``x`` from the ``source`` device; a twin of ``jax.lax.pbroadcast``.

    See :func:`broadcast`. Works on CPU, where jax.lax's is not implemented.

    Example:
      On a mesh of 4 devices along ``"i"``, with ``x`` 0, 1, 2, 3 on them:

      >>> jaxcomm.pbroadcast(x, "i", 2)  # 2, 2, 2, 2  # doctest: +SKIP
    """
    return _broadcast("pbroadcast", "source", x, axis_name, source, lane, backend)


def _broadcast(name, called, x, axis_name, root, lane, backend):
    axes = replica_groups.canonical_axes(axis_name)
    return define.bind(
        broadcast_impl, x, axes, name=name, lane=lane, backend=backend,
        root=root_index(root, axes, name, called),
    )  # fmt: skip


def root_index(root, axes, name: str, called: str = "root") -> int:
    """Returns the root, checked to be an index along the axes.

    ``called``: what the function ``name`` calls it.
    """
    compat.check_axes_bound(axes, name)
    size = define.group_size(axes)
    root = define.integer(root, f"{name} over {axes}: {called}")
    if not 0 <= root < size:
        raise ValueError(
            f"{name} over {axes}: {called} {root} is not among the {size} indices "
            f"0 .. {size - 1}"
        )
    return root


class Broadcast(define.Collective):
    """Parameter: root."""

    name = "broadcast"
    replicated = True

    def planner_params(self, avals, size, *, root, **_):
        return [root]

    def emulate(self, x, i, *, root):
        return jnp.broadcast_to(x[root], x.shape)

    def xla(self, xs, axes, index_groups, *, root):
        # jax.lax.pbroadcast is not implemented on every platform. The zeros of the
        # other ranks leave the root's value as it is; -0.0 alone becomes 0.0.
        is_root = jax.lax.axis_index(axes) == root
        return [
            jax.lax.psum(jnp.where(is_root, x, jnp.zeros_like(x)), axes).astype(x.dtype)
            for x in xs
        ]

    def transpose(self, cts, **params):
        from jaxcomm.collectives.reduce import reduce_p

        return reduce_p.bind(*cts, op="sum", **params)


broadcast_impl = Broadcast()
broadcast_p = define.define(broadcast_impl)
