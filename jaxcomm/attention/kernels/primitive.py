"""A hop that the first kernel which can computes, chosen for each platform.

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
from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters import ad, batching

from jaxcomm import compat
from jaxcomm.attention.kernels.kernel import Grads, Hop, Kernel, Saved, is_empty
from jaxcomm.attention.kernels.selection import SCOPE, select, unpacked
from jaxcomm.attention.kernels.xla.kernel import DIFFERENTIABLE, XLA
from jaxcomm.attention.mask import promotes_ranks
from jaxcomm.compat import gpus

_UNMAPPED = -1
# As in Hop.platform; the first is for all others.
_PLATFORMS = {None: "other", "cpu": "cpu", "cuda": "cuda", "rocm": "rocm", "tpu": "tpu"}


def hop_forward(hop: Hop, merged=None):
    """Compute attention over one block of keys.

    Args:
      merged: (out, lse) of the same queries over other keys, to merge with; or None.

    Returns:
      (out, lse): (B, T, N, V) and (B, T, N) in ``hop.sum_dtype``. Rows that see no key
      give 0 and -inf.

    Raises:
      ValueError: when lowered, if the kernel that was asked for cannot do it there.
      TypeError: likewise, if it returns arrays of other shapes or dtypes.
    """
    leaves, tree = jax.tree.flatten((hop, merged))
    return tuple(hop_forward_p.bind(*leaves, tree=tree))


def hop_backward(hop: Hop, saved: Saved, total=None) -> Grads:
    """Compute what one block of keys adds to the gradients.

    Args:
      saved: what is known over all keys.
      total: gradient of the queries by other keys, to add to; or None.

    Returns:
      Gradients in ``hop.sum_dtype``.
    """
    # So that exp(score - lse) is 0 for rows that see no key.
    lse = jnp.where(is_empty(saved.lse), jnp.inf, saved.lse)
    leaves, tree = jax.tree.flatten((hop, saved._replace(lse=lse), total))
    found = iter(hop_backward_p.bind(*leaves, tree=tree))
    return Grads(*(None if x is None else next(found) for x in _with_grads(hop)))


def _with_grads(hop: Hop):
    return hop.query, hop.key, hop.value, hop.scores.bias, hop.scores.slopes


def _forward(kernel: Kernel, hop: Hop, merged):
    if merged is None:
        return kernel.forward(hop)
    return kernel.forward_onto(hop, merged)


def _backward(kernel: Kernel, hop: Hop, saved: Saved, total):
    if total is None:
        return kernel.backward(hop, saved)
    return kernel.backward_onto(hop, saved, total)


def _forward_avals(hop: Hop, *_):
    shape, dtype = hop.query.shape[:3], hop.sum_dtype
    return {"out": ((*shape, hop.value.shape[3]), dtype), "lse": (shape, dtype)}


def _backward_avals(hop: Hop, *_):
    found = zip(Grads._fields, _with_grads(hop), strict=True)
    return {name: (x.shape, hop.sum_dtype) for name, x in found if x is not None}


def _checked(asked: str, found, names, avals: dict) -> list:
    """Return the results of a kernel in the dtype of sums.

    Args:
      names: of all that it may return, in order.
      avals: (shape, dtype) of what it must return, by name.
    """
    given = {n: x for n, x in zip(names, found, strict=False) if x is not None}
    if len(found) > len(names) or given.keys() != avals.keys():
        raise TypeError(
            f"{asked} returned {', '.join(given)} of {len(found)} results. Expected "
            f"{', '.join(avals)}, and None for others of {', '.join(names)}."
        )
    for name, x in given.items():
        shape, dtype = avals[name]
        is_right = x.shape == shape and jnp.issubdtype(x.dtype, jnp.floating)
        # A logarithm of few bits would be an error in each weight.
        if not is_right or (name == "lse" and x.dtype != dtype):
            raise TypeError(
                f"{asked} returned {name} of shape {x.shape} and dtype {x.dtype}. "
                f"Expected {shape} and {dtype}."
            )
    return [x.astype(avals[name][1]) for name, x in given.items()]


def _in_order(function):
    """Let a function take and return arrays that lie in memory as their shape says.

    XLA has its tiles choose. Where they are the longest of several branches, the others
    move what their kernels take and return to that order and back.
    """

    def in_order(*arrays):
        found = function(*map(_lies_in_order, arrays))
        return [_lies_in_order(x) for x in found]

    return in_order


def _lies_in_order(x):
    return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if x.ndim > 1 else x


def _define(name, function, avals, is_backward: bool):
    """Make a primitive and register its rules.

    Args:
      name: what it is called in jaxprs.
      function: of a kernel, a hop and what else there is.
      avals: of a hop: returns (shape, dtype) pairs by name.
      is_backward: whether a bias has a gradient among the results.
    """
    primitive = jax.extend.core.Primitive(name)
    primitive.multiple_results = True

    def compute(kernel: Kernel, *leaves, tree, **known):
        hop, *others = jax.tree.unflatten(tree, leaves)
        found = function(kernel, hop.replace(is_backward=is_backward, **known), *others)
        asked = f"{type(kernel).__name__}.{name.rpartition('_')[2]}"
        names = Grads._fields if is_backward else ("out", "lse")
        return _checked(asked, found, names, avals(hop))

    def abstract_eval(*leaves, tree):
        found = avals(*jax.tree.unflatten(tree, leaves))
        outs = [jax.core.ShapedArray(*aval) for aval in found.values()]
        if not compat.checks_varying_axes():
            return outs
        axes = frozenset().union(*map(compat.varying_axes, leaves))
        return [compat.with_varying_axes(out, axes) for out in outs]

    @promotes_ranks
    def lower(platform, ctx, *leaves, tree):
        hop, *_ = jax.tree.unflatten(tree, ctx.avals_in)
        known = {
            "platform": platform,
            "automatic_axes": tuple(sorted(compat.automatic_axes(ctx))),
        }
        kernel = select(hop.replace(is_backward=is_backward, **known))
        of_kernel = jax.named_scope(f"{SCOPE}{kernel.name}")(
            functools.partial(compute, kernel, tree=tree, **known)
        )
        if platform == "cuda" and kernel == XLA:
            of_kernel = _in_order(of_kernel)
        with gpus.without_triton_warning():
            return compat.lower_as(of_kernel, ctx, *leaves)

    @promotes_ranks
    def jvp(primals, tangents, *, tree):
        moving = [i for i, x in enumerate(primals) if compat.has_tangent(x)]

        def of_moving(*moved):
            leaves = list(primals)
            for i, leaf in zip(moving, moved, strict=True):
                leaves[i] = leaf
            return compute(DIFFERENTIABLE, *leaves, tree=tree)

        moved = [ad.instantiate_zeros(tangents[i]) for i in moving]
        return jax.jvp(of_moving, [primals[i] for i in moving], moved)

    def batch(leaves, dims, *, tree):
        dims = [_UNMAPPED if dim is None else dim for dim in dims]
        count = next(
            x.shape[dim]
            for x, dim in zip(leaves, dims, strict=True)
            if dim != _UNMAPPED
        )
        args, dims = (jax.tree.unflatten(tree, x) for x in (leaves, dims))
        if args[0].pairs.is_packed:
            # Where documents begin in a larger batch nobody has looked.
            args, dims = ((unpacked(hop), *others) for hop, *others in (args, dims))
        outs = avals(*jax.tree.map(_one_of, args, dims)).values()
        leaves, tree = jax.tree.flatten(_fold(args, dims, count, is_backward))
        found = primitive.bind(*leaves, tree=tree)
        pairs = zip(found, outs, strict=True)
        return [_unfold(x, count, shape) for x, (shape, _) in pairs], [0] * len(outs)

    primitive.def_impl(jax.jit(primitive.bind, static_argnames="tree"))
    primitive.def_abstract_eval(abstract_eval)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    for platform, called in _PLATFORMS.items():
        rule = functools.partial(lower, called)
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
      args: a tree of a hop and what else there is.
      dims: a tree like it: which dimension of each leaf is mapped, or ``_UNMAPPED``.
      count: extent of the mapped dimension.
      is_backward: whether a bias has a gradient, which then is one of each.
    """
    hop, *others = args
    of_hop, *of_others = dims
    batch = _one_of(hop.query, of_hop.query).shape[0]

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
            rest = tokens._replace(positions=None), dims._replace(positions=None)
            return jax.tree.map(fold, *rest)._replace(positions=at)
        if at.ndim - (dim != _UNMAPPED) == 1:
            at, dim = stack(at, dim)[:, None], 0
            tokens, dims = tokens._replace(positions=at), dims._replace(positions=dim)
        return jax.tree.map(fold, tokens, dims)

    bias, dim = hop.scores.bias, of_hop.scores.bias
    is_shared = bias is not None and dim == _UNMAPPED and bias.shape[0] == 1
    serves_all = is_shared and not is_backward  # A larger batch, as it is.

    def rest(hop):
        """Leave out what is folded in other ways, or not at all."""
        scores = hop.scores.replace(bias=None) if serves_all else hop.scores
        hop = hop.with_pairs(queries=None, keys=None, block=None)
        return hop.replace(scores=scores)

    folded = jax.tree.map(fold, rest(hop), rest(of_hop))
    scores = folded.scores.replace(bias=bias) if serves_all else folded.scores
    pairs, of_pairs = hop.pairs, of_hop.pairs
    block = pairs.block
    if block is not None and of_pairs.block != _UNMAPPED:
        block = jnp.repeat(block, batch)
    folded = folded.replace(scores=scores).with_pairs(
        queries=fold_tokens(pairs.queries, of_pairs.queries),
        keys=fold_tokens(pairs.keys, of_pairs.keys),
        block=block,
    )
    return folded, *jax.tree.map(fold, tuple(others), tuple(of_others))


def _unfold(x, count: int, shape):
    """Undo the folding of a result that has a shape of its own."""
    each = x.shape[0] // count if count else shape[0]
    x = x.reshape(count, each, *shape[1:])
    # A bias with one batch: its gradient is the sum over the batch.
    return x if x.shape[1] == shape[0] else x.sum(1, keepdims=True)


hop_forward_p = _define("jaxcomm_hop_forward", _forward, _forward_avals, False)
hop_backward_p = _define("jaxcomm_hop_backward", _backward, _backward_avals, True)
