"""levanter: ``attn_backend=jax_flash`` attends around a ring of the position's axis.

Call ``install(module, mesh)`` before a trace, and map ``position`` to a mesh axis.
"""

import math

import haliax
import jax
from haliax.partitioning import pspec_for_axis

import jaxcomm


def flash_attention(
    QPos, KPos, Key, q, k, v, mask=None, bias=None, attn_sink=None, *, inference,
    dropout=0.0, key=None, block_size=None, dtype=None, precision=None,
    scaling_factor=None, logits_soft_cap=None, mesh=None, batch=("batch",),
):  # fmt: skip
    """Do what levanter's function does."""
    q_pos, k_pos, size = q.resolve_axis(QPos), k.resolve_axis(KPos), q.resolve_axis(Key)
    rows = tuple(axis for axis in q.axes if axis.name in batch)
    heads = tuple(axis for axis in k.axes if axis not in (*rows, k_pos, size))
    # The queries of a group share a head of the keys: the group is the inner axis.
    all_heads = (*heads, *(x for x in q.axes if x not in (*rows, q_pos, *heads, size)))
    others = [getattr(mask, name, None) for name in ("explicit_mask", "causal_offset")]
    has_other = any(x is not None for x in (*others, precision))
    if has_other or isinstance(mask, haliax.NamedArray):
        raise NotImplementedError(
            "no explicit mask, causal offset or precision. Pass attn_backend=vanilla"
        )

    def array(x, *axes):
        x = x.broadcast_to(sum(axes, ())).rearrange(sum(axes, ())).array
        return x.reshape([math.prod(axis.size for axis in each) for each in axes])

    ids, window = (getattr(mask, x, None) for x in ("segment_ids", "sliding_window"))
    if ids is not None:  # those of the keys may be over the axis of the queries
        ends = q_pos, k_pos if k_pos in ids[1].axes else q_pos
        ids = [array(x, rows, (a,)) for x, a in zip(ids, ends, strict=True)]
    spec = jax.P(*(x and pspec_for_axis(x)[0] for x in (rows, (q_pos,), heads)))
    parts = (q, q_pos, all_heads), (k, k_pos, heads), (v, k_pos, heads)
    out = jaxcomm.dot_product_attention(
        *(array(x.astype(dtype or q.dtype), rows, (at,), of, (size,))
          for x, at, of in parts),
        None if bias is None else array(bias, rows, all_heads, (q_pos,), (k_pos,)),
        sinks=None if attn_sink is None else array(attn_sink, all_heads),
        sharding=jax.NamedSharding(mesh, spec) if mesh else spec,
        is_causal=window is not None or getattr(mask, "is_causal", False),
        local_window_size=None if window is None else (window - 1, 0),
        scale=scaling_factor, logits_soft_cap=logits_soft_cap, segment_ids=ids,
        dropout=None if inference else (dropout, key),
    )  # fmt: skip
    out = out.reshape([axis.size for axis in (*rows, q_pos, *all_heads, size)])
    return haliax.named(out, (*rows, q_pos, *all_heads, size))


def install(module, mesh=None):
    """Put it into ``levanter.models.flash_attention``."""
    module.flash_attention = lambda *of, **how: flash_attention(*of, mesh=mesh, **how)
