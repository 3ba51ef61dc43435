"""A hop that a kernel computes on CUDA, and XLA elsewhere.

Which one is chosen when a program is lowered for a platform, so one traced or exported
program serves them all. Second derivatives are always XLA's.

A hop is one primitive also where XLA computes it: what JAX can see into it takes apart.
Under ``jax.checkpoint``, or in a scan over layers, it would compute the masks of all
pairs of tokens first, since they follow from positions alone, and keep them for the way
back. And outside of ``jax.jit`` it would compile every operation by itself.
"""

import functools

import jax
import jax.core
import jax.extend
import jax.numpy as jnp

from jaxcomm import compat
from jaxcomm.attention.kernels import fused as fused_hop
from jaxcomm.attention.kernels import pallas, tile_loops
from jaxcomm.attention.kernels import xla as hop
from jaxcomm.attention.kernels.operands import Grads, HopConfig, Operands, sum_dtype
from jaxcomm.attention.kernels.selection import SCOPE, select
from jaxcomm.attention.mask import Tokens
from jaxcomm.attention.merge import merge
from jaxcomm.attention.promotion import promotes_ranks

_UNMAPPED = -1


def hop_forward(operands: Operands, merged=None, *, config: HopConfig):
    """Compute attention over one block, as :func:`xla.hop_forward`.

    Args:
      operands, config: as there.
      merged: (out, lse) of the same queries over other keys, to merge with; or None.

    Raises:
      ValueError: when lowered, if ``config.implementation`` cannot be had there.
    """
    leaves, tree = jax.tree.flatten((operands, merged))
    return tuple(hop_forward_p.bind(*leaves, tree=tree, config=config))


def hop_backward(
    operands: Operands, grad_out, lse, delta, out, total=None, *, config: HopConfig
) -> Grads:
    """Compute the gradients as :func:`jaxcomm.attention.kernels.xla.hop_backward` does.

    Args:
      operands, grad_out, lse, delta, config: as there.
      out: (B, T, N, V), the output over all keys, in the dtype of ``query``.
      total: gradient of the queries by other keys, to add to; or None.

    Raises:
      ValueError: when lowered, if ``config.implementation`` cannot be had there.
    """
    leaves, tree = jax.tree.flatten((operands, grad_out, lse, delta, out, total))
    found = list(hop_backward_p.bind(*leaves, tree=tree, config=config))
    terms = operands.terms
    given = (*operands[:3], terms.bias, terms.slopes)
    return Grads(*(None if x is None else found.pop(0) for x in given))


def _forward_avals(operands: Operands, merged):
    query, value = operands.query, operands.value
    dtype = sum_dtype(query.dtype)
    return [((*query.shape[:3], value.shape[3]), dtype), (query.shape[:3], dtype)]


def _backward_avals(operands: Operands, *others):
    given = (*operands[:3], operands.terms.bias, operands.terms.slopes)
    dtype = sum_dtype(operands.query.dtype)
    return [(x.shape, dtype) for x in given if x is not None]


def _then_merge(forward):
    """Return a function that merges what ``forward`` computes."""

    def compute(operands: Operands, merged, **known):
        found = forward(operands, **known)
        return found if merged is None else merge(*merged, *found)

    return compute


def _then_add(backward):
    """Return a function that adds to what ``backward`` computes."""

    def compute(*args, **known):
        *args, total = args
        found = backward(*args, **known)
        if total is None:
            return found
        return found._replace(query=total + found.query)

    return compute


def _backward_by_xla(*args, **known):
    return hop.hop_backward(*args[:-1], **known)


def _define(name, functions, *, avals, head_size, is_backward):
    """Make a primitive and register its rules.

    Args:
      name: what it is called in jaxprs.
      functions: by implementation, of a tree, the operands and what else there is, and
        ``config``.
      avals: of the tree: returns (shape, dtype) pairs.
      head_size: given that of the query and ``config``, the one that cuDNN sees.
      is_backward: whether a bias has a gradient among the results.
    """
    primitive = jax.extend.core.Primitive(name)
    primitive.multiple_results = True

    def flatten(function):
        def of_leaves(*leaves, tree, **known):
            args = jax.tree.unflatten(tree, leaves)
            return jax.tree.leaves(function(*args, **known))

        return of_leaves

    flat = {name: flatten(function) for name, function in functions.items()}

    def abstract_eval(*leaves, tree, config):
        found = avals(*jax.tree.unflatten(tree, leaves))
        outs = [jax.core.ShapedArray(*aval) for aval in found]
        if not compat.checks_varying_axes():
            return outs
        axes = frozenset().union(*(aval.mat.varying for aval in leaves))
        return [compat.with_varying_axes(out, axes) for out in outs]

    @promotes_ranks
    def lower(platform, ctx, *leaves, tree, config):
        operands, *_ = jax.tree.unflatten(tree, ctx.avals_in)
        size = head_size(operands.query.shape[3], config)
        name = select(ctx, platform, operands, config, size)
        chosen = jax.named_scope(f"{SCOPE}{name}")(flat[name])
        known = {"tree": tree, "config": config}
        if (platform, name) == ("cuda", "xla"):
            known["loop"] = tile_loops.ON_GPU
        with compat.without_triton_warning():
            return compat.lower_as(chosen, ctx, *leaves, **known)

    @promotes_ranks
    def jvp(primals, tangents, *, tree, config):
        moving = [i for i, x in enumerate(primals) if compat.has_tangent(x)]
        loop = tile_loops.DIFFERENTIABLE

        def of_moving(*moved):
            leaves = list(primals)
            for i, leaf in zip(moving, moved, strict=True):
                leaves[i] = leaf
            return flat["xla"](*leaves, tree=tree, config=config, loop=loop)

        moved = [compat.ad.instantiate_zeros(tangents[i]) for i in moving]
        return jax.jvp(of_moving, [primals[i] for i in moving], moved)

    def batch(leaves, dims, *, tree, config):
        dims = [_UNMAPPED if dim is None else dim for dim in dims]
        count = next(
            x.shape[dim]
            for x, dim in zip(leaves, dims, strict=True)
            if dim != _UNMAPPED
        )
        args, dims = (jax.tree.unflatten(tree, x) for x in (leaves, dims))
        outs = avals(*jax.tree.map(_one_of, args, dims))
        leaves, tree = jax.tree.flatten(_fold(args, dims, count, is_backward))
        found = primitive.bind(*leaves, tree=tree, config=config)
        pairs = zip(found, outs, strict=True)
        return [_unfold(x, count, shape) for x, (shape, _) in pairs], [0] * len(outs)

    primitive.def_impl(jax.jit(primitive.bind, static_argnames=("tree", "config")))
    primitive.def_abstract_eval(abstract_eval)
    compat.ad.primitive_jvps[primitive] = jvp
    compat.batching.primitive_batchers[primitive] = batch
    for platform in (None, "cuda"):
        rule = functools.partial(lower, platform)
        compat.register_lowering(primitive, rule, platform)
    return primitive


def _one_of(x, dim):
    """Return the shape of one of the mapped arrays."""
    shape = list(x.shape)
    if dim != _UNMAPPED:
        del shape[dim]
    return jax.ShapeDtypeStruct(shape, x.dtype)


def _fold(args, dims, count: int, is_backward: bool):
    """Make a mapped dimension part of the batch.

    Args:
      args: a tree of the operands and what else there is.
      dims: a tree like it: which dimension of each leaf is mapped, or ``_UNMAPPED``.
      count: extent of the mapped dimension.
      is_backward: whether a bias has a gradient, which then is one of each.
    """
    batch = _one_of(args[0].query, dims[0].query).shape[0]

    def stack(x, dim):
        if dim == _UNMAPPED:
            return jnp.broadcast_to(x, (count, *x.shape))
        return jnp.moveaxis(x, dim, 0)

    def fold(x, dim):
        x = stack(x, dim)
        x = jnp.broadcast_to(x, (count, batch, *x.shape[2:]))
        return x.reshape(count * batch, *x.shape[2:])

    def fold_tokens(tokens, dims):
        at, dim = tokens.positions, dims.positions
        if at.ndim == 1 and dim == _UNMAPPED:  # The same for all of a larger batch.
            ids = jax.tree.map(fold, tokens.segment_ids, dims.segment_ids)
            return Tokens(at, ids)
        if at.ndim - (dim != _UNMAPPED) == 1:
            at, dim = stack(at, dim)[:, None], 0
            tokens, dims = tokens._replace(positions=at), dims._replace(positions=dim)
        return jax.tree.map(fold, tokens, dims)

    operands, *others = args
    of_operands, *of_others = dims
    folded = jax.tree.map(
        fold,
        operands._replace(queries=None, keys=None, terms=None),
        of_operands._replace(queries=None, keys=None, terms=None),
    )
    terms, of_terms = operands.terms, of_operands.terms
    bias = terms.bias
    is_shared = bias is not None and of_terms.bias == _UNMAPPED and bias.shape[0] == 1
    if is_shared and not is_backward:  # It serves a larger batch as it is.
        of_terms, terms = of_terms._replace(bias=None), terms._replace(bias=None)
    folded_terms = jax.tree.map(fold, terms, of_terms)
    if terms.bias is None:
        folded_terms = folded_terms._replace(bias=bias)
    folded = folded._replace(
        queries=fold_tokens(operands.queries, of_operands.queries),
        keys=fold_tokens(operands.keys, of_operands.keys),
        terms=folded_terms,
    )
    return (folded, *jax.tree.map(fold, tuple(others), tuple(of_others)))


def _unfold(x, count: int, shape):
    """Undo the folding of a result that has a shape of its own."""
    x = x.reshape(count, -1, *shape[1:])
    # A bias with one batch: its gradient is the sum over the batch.
    return x if x.shape[1] == shape[0] else x.sum(1, keepdims=True)


hop_forward_p = _define(
    "jaxcomm_hop_forward",
    {
        "xla": _then_merge(hop.hop_forward),
        "pallas": pallas.hop_forward,
        "cudnn": _then_merge(fused_hop.hop_forward),
    },
    avals=_forward_avals,
    head_size=lambda head_size, config: head_size,
    is_backward=False,
)
hop_backward_p = _define(
    "jaxcomm_hop_backward",
    {
        "xla": _then_add(_backward_by_xla),
        "pallas": pallas.hop_backward,
        "cudnn": _then_add(fused_hop.hop_backward),
    },
    avals=_backward_avals,
    head_size=fused_hop.backward_head_size,
    is_backward=True,
)
