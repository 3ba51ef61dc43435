"""All-gather."""

import math

import jax
import jax.numpy as jnp

from jaxcomm import compat
from jaxcomm.communicator import replica_groups
from jaxcomm.primitives import define


def all_gather(
    x, axis_name, *, axis_index_groups=None, axis=0, tiled=False, to="varying",
    lane=None, backend=None,
):  # fmt: skip
    """Collects ``x`` from all devices of a mesh axis; a twin of ``jax.lax.all_gather``.

    Args:
      x: a pytree of arrays of any shape and dtype. Its leaves travel in one call.
      axis_name: an axis name, or a tuple of names that number the ranks row-major.
      axis_index_groups: groups, of one size, to gather within instead. If None, all.
      axis: where in the result the ranks are laid out.
      tiled: concatenate along ``axis`` instead of stacking along a new one.
      to: ``"varying"``, or ``"invarying"`` for a result typed as equal on all devices
        of the axis (its gradient is then not summed over them).
      lane: the lane to go through. If None, the default one.
      backend: ``"host"``, ``"nccl"`` or ``"xla"``. If None, what :func:`jaxcomm.init`
        chose for these axes, else the platform's own.

    Returns:
      A pytree of arrays with a new dimension of the size of the axis at ``axis``, or,
      tiled, with dimension ``axis`` that many times as long.

    Raises:
      NameError: if the axis is not bound.
      TypeError: if tiled is not True or False.
      ValueError: if ``axis`` is out of range, groups are of unequal sizes, or ``to``
        is none of the above.

    Example:
      On a mesh of 4 devices along ``"i"``, with ``x`` 0, 1, 2, 3 on them:

      >>> jaxcomm.all_gather(x, "i")  # doctest: +SKIP
      Array([0, 1, 2, 3], dtype=int32)
    """
    return gather_all(
        "all_gather", x, axis_name, axis_index_groups, axis, tiled, to, lane, backend
    )


def gather_all(
    name: str, x, axis_name, axis_index_groups, axis, tiled, to, lane, backend,
    bind=define.bind,
):  # fmt: skip
    """Checks an all-gather and hands it to ``bind``, for the function ``name``."""
    axes = replica_groups.canonical_axes(axis_name)
    if to not in ("varying", "invarying"):
        raise ValueError(
            f"{name} over {axes}: to={to!r}; jaxcomm knows 'varying' and "
            f"'invarying'. For 'reduced' use jax.lax.all_gather."
        )
    if to == "invarying" and axis_index_groups is not None:
        raise ValueError(
            f"{name} over {axes}: with axis_index_groups the result differs "
            f"between groups; use to='varying'"
        )
    if not axes:
        return x
    tiled = define.flag(tiled, f"{name} over {axes}: tiled")
    x = define.as_arrays(x, axes, name)
    index_groups = define.index_groups_of(axes, axis_index_groups, name)
    define.group_size(axes, index_groups)
    dimensions = tuple(
        define.canonical_dimension(axis, jnp.ndim(leaf) + (not tiled), name, "axis")
        for leaf in jax.tree.leaves(x)
    )
    return bind(
        all_gather_impl, x, axes, name=name, index_groups=index_groups,
        invariant=to == "invarying" and compat.checks_varying_axes(),
        lane=lane, backend=backend, dimensions=dimensions, tiled=tiled,
    )  # fmt: skip


class AllGather(define.Collective):
    """Parameters: dimensions, one for each leaf; tiled."""

    name = "all_gather"
    replicated = True
    dimension_params = ("dimensions",)

    def shape(self, shape, size, i, *, dimensions, tiled):
        d = dimensions[i]
        if tiled:
            return (*shape[:d], shape[d] * size, *shape[d + 1 :])
        return (*shape[:d], size, *shape[d:])

    def planner_params(self, avals, size, *, dimensions, **_):
        return [
            math.prod(aval.shape[:d]) for aval, d in zip(avals, dimensions, strict=True)
        ]

    def emulate(self, x, i, *, dimensions, tiled):
        out = jnp.moveaxis(x, 0, dimensions[i])
        out = out.reshape(self.shape(x.shape[1:], x.shape[0], i,
                                     dimensions=dimensions, tiled=tiled))  # fmt: skip
        return jnp.broadcast_to(out, (x.shape[0], *out.shape))

    def xla(self, xs, axes, index_groups, *, dimensions, tiled):
        return [
            jax.lax.all_gather(
                x, axes, axis_index_groups=index_groups, axis=d, tiled=tiled
            )
            for x, d in zip(xs, dimensions, strict=True)
        ]

    def dual(self, **params):
        from jaxcomm.collectives.reduce_scatter import reduce_scatter

        return None if params["invariant"] else (reduce_scatter, params)

    def transpose(self, cts, **params):
        if not params["invariant"]:
            return super().transpose(cts, **params)
        dimensions, tiled, axes = params["dimensions"], params["tiled"], params["axes"]
        # One cotangent for all: each rank takes the part that belongs to its operand.
        size, rank = define.group_size(axes), jax.lax.axis_index(axes)
        parts = []
        for ct, d in zip(cts, dimensions, strict=True):
            width = ct.shape[d] // size
            part = jax.lax.dynamic_slice_in_dim(ct, rank * width, width, d)
            parts.append(part if tiled else jnp.squeeze(part, d))
        return parts


all_gather_impl = AllGather()
all_gather_p = define.define(all_gather_impl)
