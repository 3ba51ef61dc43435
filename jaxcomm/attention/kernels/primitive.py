"""A hop that cuDNN computes on CUDA, and XLA elsewhere.

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
from jaxcomm.attention.kernels import cudnn_support
from jaxcomm.attention.kernels import fused as fused_hop
from jaxcomm.attention.kernels import xla as hop
from jaxcomm.attention.kernels.xla import HopConfig, sum_dtype

# Which operands are positions, without a batch dimension.
_POSITIONS = (3, 4)


def hop_forward(
    query, key, value, query_positions, key_positions, *, config: HopConfig
):
    """Compute attention over one block, as :func:`xla.hop_forward`.

    Raises:
      ValueError: when lowered, if ``config.implementation`` cannot be had there.
    """
    operands = (query, key, value, query_positions, key_positions)
    return tuple(hop_forward_p.bind(*operands, config=config))


def hop_backward(
    query,
    key,
    value,
    query_positions,
    key_positions,
    grad_out,
    lse,
    delta,
    out,
    *,
    config: HopConfig,
):
    """Compute the gradients as :func:`jaxcomm.attention.kernels.xla.hop_backward` does.

    Args:
      query, key, value, query_positions, key_positions, grad_out, lse, delta, config:
        as there.
      out: (B, T, N, D), the output over all keys, in the dtype of ``query``.

    Raises:
      ValueError: when lowered, if ``config.implementation`` cannot be had there.
    """
    operands = (query, key, value, query_positions, key_positions)
    operands += (grad_out, lse, delta, out)
    return tuple(hop_backward_p.bind(*operands, config=config))


def _xla_backward(*operands, config):
    return hop.hop_backward(*operands[:-1], config=config)


def _forward_avals(query, key, value, *others, config):
    dtype = sum_dtype(query.dtype)
    return [(query.shape, dtype), (query.shape[:3], dtype)]


def _backward_avals(query, key, value, *others, config):
    return [(x.shape, sum_dtype(x.dtype)) for x in (query, key, value)]


def _define(name, *, xla, fused, avals, head_size):
    """Make a primitive and register its rules.

    Args:
      name: what it is called in jaxprs.
      xla, fused: functions of the operands and ``config``.
      avals: as those, but returns (shape, dtype) pairs.
      head_size: given that of the query and ``config``, the one that cuDNN sees.
    """
    primitive = jax.extend.core.Primitive(name)
    primitive.multiple_results = True

    def abstract_eval(*operands, config):
        outs = [jax.core.ShapedArray(*aval) for aval in avals(*operands, config=config)]
        if not compat.checks_varying_axes():
            return outs
        axes = frozenset().union(*(aval.mat.varying for aval in operands))
        return [compat.with_varying_axes(out, axes) for out in outs]

    def lower(platform, ctx, *operands, config):
        if config.blocks is None:
            return compat.lower_as(xla, ctx, *operands, config=config)
        size = head_size(ctx.avals_in[0].shape[3], config)
        reason = cudnn_support.why_not_compiled(
            ctx, platform, config.implementation, size
        )
        chosen = fused if cudnn_support.is_fused(config.implementation, reason) else xla
        return compat.lower_as(chosen, ctx, *operands, config=config)

    def jvp(primals, tangents, *, config):
        moving = [i for i in range(len(primals)) if i not in _POSITIONS]

        def of_moving(*moved):
            operands = list(primals)
            for i, operand in zip(moving, moved, strict=True):
                operands[i] = operand
            return list(xla(*operands, config=config))

        moved = [compat.ad.instantiate_zeros(tangents[i]) for i in moving]
        return jax.jvp(of_moving, [primals[i] for i in moving], moved)

    def batch(operands, dims, *, config):
        if any(dims[i] is not None for i in _POSITIONS):
            # vmap over the ring's own axis: ranks differ in what they compute.
            reason = "jax.vmap gives ring_attention its axis"
            cudnn_support.is_fused(config.implementation, reason)
            each = jax.vmap(functools.partial(xla, config=config), in_axes=dims)
            outs = list(each(*operands))
            return outs, [0] * len(outs)
        pairs = list(zip(operands, dims, strict=True))
        count = next(x.shape[dim] for x, dim in pairs if dim is not None)
        sizes = list(operands[0].shape)
        if dims[0] is not None:
            del sizes[dims[0]]
        folded = [
            x if i in _POSITIONS else _fold(x, dim, count)
            for i, (x, dim) in enumerate(pairs)
        ]
        outs = primitive.bind(*folded, config=config)
        outs = [out.reshape(count, sizes[0], *out.shape[1:]) for out in outs]
        return outs, [0] * len(outs)

    primitive.def_impl(jax.jit(primitive.bind, static_argnames="config"))
    primitive.def_abstract_eval(abstract_eval)
    compat.ad.primitive_jvps[primitive] = jvp
    compat.batching.primitive_batchers[primitive] = batch
    for platform in (None, "cuda"):
        rule = functools.partial(lower, platform)
        compat.register_lowering(primitive, rule, platform)
    return primitive


def _fold(x, dim: int | None, count: int):
    """Make a vmapped dimension part of the batch."""
    if dim is None:
        x = jnp.broadcast_to(x[None], (count, *x.shape))
    else:
        x = jnp.moveaxis(x, dim, 0)
    return x.reshape(count * x.shape[1], *x.shape[2:])


hop_forward_p = _define(
    "jaxcomm_hop_forward",
    xla=hop.hop_forward,
    fused=fused_hop.hop_forward,
    avals=_forward_avals,
    head_size=lambda head_size, config: head_size,
)
hop_backward_p = _define(
    "jaxcomm_hop_backward",
    xla=_xla_backward,
    fused=fused_hop.hop_backward,
    avals=_backward_avals,
    head_size=fused_hop.backward_head_size,
)
