"""Typing a value as varying over mesh axes, with our own sum as transpose."""

from typing import Literal

import jax

from jaxcomm import compat
from jaxcomm.primitives import lax, request
from jaxcomm.primitives.call import AxisName, PyTree, call_of, check_array
from jaxcomm.primitives.pvary import cast


def pcast(
    x: PyTree,
    axis_name: AxisName,
    *,
    to: Literal["varying", "reduced", "unreduced"],
    lane: str | None = None,
    backend: str | None = None,
) -> PyTree:
    """Type a value otherwise over mesh axes; a twin of ``jax.lax.pcast``.

    It moves nothing. The transpose of a cast from ``"invarying"`` is our own sum: the
    gradient of parameters that went through it is summed in one call for all leaves,
    where ``jax.lax.pcast(x, axes, to="varying")`` would leave the sum to XLA.

    Args:
      x: a pytree of arrays of any shape and dtype.
      axis_name: an axis name or a tuple of names.
      to: ``"varying"``, from a value that is equal on all devices or reduced;
        ``"reduced"``, from a value that is equal on all devices; or ``"unreduced"``,
        from a varying value.
      lane: the lane of its transpose; see :func:`jaxcomm.using`.
      backend: the backend of its transpose.

    Returns:
      The same values. Outside ``jax.shard_map(..., check_vma=True)``, where values
      have no such type, ``x`` itself.

    Raises:
      NameError: if the axis is not bound.
      TypeError: if a leaf is not an array, or the axes are a set.
      ValueError: if there is no such cast, such as of what varies already to
        ``"varying"``.

    Example:
      >>> def gradient(w, x):
      ...     def loss(w):
      ...         return (jaxcomm.pcast(w, "i", to="varying") * x).sum()
      ...     return jax.grad(loss)(w)
      >>> f = jax.shard_map(
      ...     gradient, in_specs=(jax.P(), jax.P("i")), out_specs=jax.P()
      ... )
      >>> f(jnp.float32(2.0), jnp.arange(4.0))
      Array(6., dtype=float32)
    """
    if isinstance(axis_name, (set, frozenset)):
        raise TypeError(f"pcast: axes must be a name or a tuple, got {axis_name!r}")
    call = call_of("pcast", axis_name, lane=lane, backend=backend)
    for leaf in jax.tree.leaves(x):
        check_array(leaf, f"{call.where}: every leaf of x")
    if to not in ("varying", "reduced", "unreduced"):
        raise ValueError(
            f"{call.where}: to={to!r}; choose one of 'varying', 'reduced' and "
            "'unreduced'"
        )
    if not compat.checks_varying_axes():
        if to == "unreduced":
            raise ValueError(
                f"{call.where}: to='unreduced' is a type, which values have only "
                f"inside jax.shard_map(..., check_vma=True)"
            )
        return x
    leaves, tree = jax.tree.flatten(request.as_arrays(x, call))
    manual = jax.sharding.get_abstract_mesh().manual_axes
    # The axis of a jax.vmap is in no type.
    call = call.replace(axes=tuple(axis for axis in call.axes if axis in manual))
    if not leaves or not call.axes:
        return x
    kinds = [request.kind_of(leaf, call) for leaf in leaves]
    equal = [i for i, kind in enumerate(kinds) if kind == "invarying"]
    if to != "unreduced" and equal:
        outs = cast([leaves[i] for i in equal], call.replace(to=to))
        for i, out in zip(equal, outs, strict=True):
            leaves[i] = out
    for i, kind in enumerate(kinds):
        if (kind, to) in (("varying", "unreduced"), ("reduced", "varying")):
            # Each is the other's transpose: nothing ever moves.
            leaves[i] = lax.pcast(leaves[i], call.axes, to=to)
        elif kind != "invarying" or to == "unreduced":
            raise ValueError(
                f"{call.where}: x is {kind}; jaxcomm has no cast to {to!r}"
            )
    return jax.tree.unflatten(tree, leaves)
