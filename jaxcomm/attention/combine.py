"""Combine attentions of one set of queries over keys that are split across ranks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import compat
from jaxcomm.attention.kernels.kernel import at_least_half, sum_dtype
from jaxcomm.attention.mask import promotes_ranks
from jaxcomm.collectives.all_gather import all_gather
from jaxcomm.collectives.all_to_all import all_to_all
from jaxcomm.communicator import replica_groups
from jaxcomm.primitives import arguments
from jaxcomm.primitives.call import AxisName


@promotes_ranks
def combine(
    out: jax.Array | np.ndarray,
    lse: jax.Array | np.ndarray,
    axis_name: AxisName,
    *,
    scatter: int | None = None,
    lane: str | None = None,
    backend: str | None = None,
) -> Any:
    """Merge the attention of equal queries over each rank's part of the keys.

    For decoding with a split cache: every rank attends with the same queries to its own
    keys, and this is the attention to all of them. Output and log-sum-exp travel in one
    collective, and the merge is in float32. Differentiable, if ``lse`` is.

    ``jax.nn.dot_product_attention(return_residual=True)`` stops the gradient of its
    log-sum-exp, and rounds it to the dtype of the keys. Use it where you take no
    gradient: those of queries and keys would be wrong without an error.

    Source: NVIDIA, Helix parallelism, 2025.

    Args:
      out: (B, T, N, V) floating, this rank's attention. A row that saw no key may hold
        anything, NaN too.
      lse: (B, T, N) float32, its log-sum-exp; -inf for rows that saw no key.
      axis_name: the mesh axis, or tuple of axes, that splits the keys.
      scatter: dimension of ``out``, 0 to 2, of which each rank keeps its part. If None,
        every rank has the whole result.
      lane: which communicator carries the bytes. If None, the default lane.
      backend: what moves the bytes. If None, the backend of the platform.

    Returns:
      (out, lse) of the same dtypes; dimension ``scatter`` is divided by the number of
      ranks. Without ``scatter`` they are typed as equal on all ranks.

    Raises:
      ValueError: the shapes do not fit, or ``scatter`` is not divisible by the ranks.
      TypeError: a dtype is not floating.
      NameError: the axis is not bound.

    >>> def decode(query, key, value):  # each rank has its part of the cache
    ...     scores = jnp.einsum("btnh,bsnh->btns", query, key)
    ...     scores *= key.shape[-1] ** -0.5
    ...     lse = jax.nn.logsumexp(scores, -1)
    ...     out = jnp.einsum("btns,bsnv->btnv", jax.nn.softmax(scores), value)
    ...     return combine(out, lse, "context", scatter=2)[0]
    """
    axes = replica_groups.canonical_axes(axis_name)
    compat.check_axes_bound(axes, "attention.combine")
    out, lse = jnp.asarray(out), jnp.asarray(lse)
    for name, x in (("out", out), ("lse", lse)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"combine: {name} has dtype {x.dtype}. Pass a floating dtype."
            )
    if out.ndim != 4 or lse.shape != out.shape[:3]:
        raise ValueError(
            f"combine: out {out.shape}, lse {lse.shape}. Pass (B, T, N, V) and the log-"
            "sum-exp of its rows, (B, T, N)."
        )
    size = jax.lax.axis_size(axes)
    dtype = sum_dtype(out.dtype)
    # The softmax of no key is NaN, and 0 times NaN as well.
    seen = jnp.where(jnp.isneginf(lse)[..., None], 0, out.astype(dtype))
    # One array: the log-sum-exp is a column more. The wide type keeps its bits.
    packed = jnp.concatenate([seen, lse.astype(dtype)[..., None]], -1)
    if scatter is None:
        # The result is equal on all ranks, and typed so.
        to = "invarying" if compat.checks_varying_axes() else "varying"
        parts = all_gather(packed, axis_name, to=to, lane=lane, backend=backend)
    else:
        scatter = arguments.integer(scatter, "combine: scatter")
        if not 0 <= scatter <= 2 or out.shape[scatter] % size:
            raise ValueError(
                f"combine: scatter={scatter} of out {out.shape} over {size} ranks. "
                "Pass 0, 1 or 2, a dimension that the ranks divide."
            )
        shape = list(packed.shape)
        shape[scatter : scatter + 1] = [size, shape[scatter] // size]
        parts = all_to_all(
            packed.reshape(shape), axis_name, scatter, 0, lane=lane, backend=backend
        )
    outs, lses = parts[..., :-1], parts[..., -1]
    largest = lses.max(0)
    # A constant of the softmax: without a gradient, which would be 0.
    top = jax.lax.stop_gradient(jnp.where(jnp.isneginf(largest), 0, largest))
    weights = jnp.exp(lses - top)
    total = weights.sum(0)
    is_empty = jnp.isneginf(largest)
    share = 1 / at_least_half(total)
    merged = (weights[..., None] * outs).sum(0) * share[..., None]
    found = top + jnp.log(at_least_half(total))
    found = jnp.where(is_empty, -jnp.inf, found)
    return merged.astype(out.dtype), found.astype(lse.dtype)
