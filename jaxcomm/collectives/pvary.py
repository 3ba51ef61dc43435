"""Typing a value as varying over mesh axes, with our own reduction as transpose."""

import jax
import jax.extend

from jaxcomm import compat
from jaxcomm.communicator import replica_groups
from jaxcomm.compat import varying_axes as varying_axes
from jaxcomm.primitives import arguments


def pvary(x, axis_name, *, lane=None, backend=None):
    """Marks a value that is equal on all devices of some axes as varying over them.

    Moves nothing. Its transpose is :func:`jaxcomm.psum`: the gradient of parameters
    that went through it is summed by our collective, all leaves in one call, where
    ``jax.lax.pvary`` would leave the sum to XLA.

    Args:
      x: a pytree of arrays of any shape and dtype.
      axis_name: an axis name or a tuple of names. Axes over which a leaf varies
        already are passed over.
      lane: the lane its transpose goes through. If None, the default one.
      backend: that of its transpose, as in :func:`jaxcomm.psum`.

    Returns:
      The same values. Outside ``jax.shard_map(..., check_vma=True)``, where values
      have no such type, ``x`` itself.

    Raises:
      NameError: if the axis is not bound.
      TypeError: if a leaf is not an array.

    Example:
      >>> def loss_of(w):
      ...     return loss(jaxcomm.pvary(w, "data"))
      >>> grads = jax.grad(loss_of)(w)  # summed over "data"  # doctest: +SKIP
    """
    axes = replica_groups.canonical_axes(axis_name)
    compat.check_axes_bound(axes, "pvary")
    arguments.check_leaves(x, axes, "pvary")
    if not compat.checks_varying_axes():
        return x
    manual = jax.sharding.get_abstract_mesh().manual_axes
    leaves, tree = jax.tree.flatten(x)
    missing: dict[tuple[str, ...], list[int]] = {}
    for i, leaf in enumerate(leaves):
        varying = varying_axes(leaf)
        lacks = tuple(a for a in axes if a in manual and a not in varying)
        missing.setdefault(lacks, []).append(i)
    for lacks, indices in missing.items():
        if not lacks:
            continue
        outs = pvary_p.bind(
            *(leaves[i] for i in indices), axes=lacks, lane=lane, backend=backend
        )
        for i, out in zip(indices, outs, strict=True):
            leaves[i] = out
    return jax.tree.unflatten(tree, leaves)


def _abstract_eval(*avals, axes, **_):
    return [
        compat.with_varying_axes(aval, aval.mat.varying | frozenset(axes))
        for aval in avals
    ]


def _jvp(primals, tangents, **params):
    ad = compat.ad
    outs = pvary_p.bind(*primals, **params)
    if all(map(compat.is_zero_tangent, tangents)):
        return outs, [compat.zero_tangent(out) for out in outs]
    tangents = [ad.instantiate_zeros(t) for t in tangents]
    return outs, pvary_p.bind(*tangents, **params)


def _transpose(cts, *operands, axes, lane, backend):
    from jaxcomm.collectives.all_reduce import psum

    ad = compat.ad
    cts = [ad.instantiate_zeros(ct) for ct in cts]
    return psum(cts, axes, lane=lane, backend=backend)


def _batch(axis_data, operands, dims, **params):
    return pvary_p.bind(*operands, **params), dims


pvary_p = jax.extend.core.Primitive("jaxcomm_pvary")
pvary_p.multiple_results = True
pvary_p.def_impl(lambda *operands, **_: list(operands))
pvary_p.def_abstract_eval(_abstract_eval)
compat.ad.primitive_jvps[pvary_p] = _jvp
compat.ad.primitive_transposes[pvary_p] = _transpose
compat.batching.fancy_primitive_batchers[pvary_p] = _batch
compat.register_lowering(pvary_p, lambda ctx, *operands, **_: list(operands))
