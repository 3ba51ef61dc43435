"""Reductions of what one device holds of all ranks, as the collectives have them."""

import jax
import jax.numpy as jnp

from jaxcomm.primitives.tree import add_rows, widen

REDUCERS = {"sum": jnp.sum, "prod": jnp.prod, "max": jnp.max, "min": jnp.min}


def reduce_stacked(x, op, keepdims=False):
    """Reduce over axis 0 as the collective does: accumulated wide, dtype kept."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and op in ("max", "min"):
        return _lexicographic(x, op, keepdims)
    if x.dtype == jnp.bool_:
        # max and min of bools; sums and products were turned into int32's before.
        return REDUCERS[op](x.astype(jnp.int8), axis=0, keepdims=keepdims).astype(bool)
    if op in ("sum", "mean"):
        total = add_rows(widen(x))
        total = (total / x.shape[0] if op == "mean" else total).astype(x.dtype)
        return total[None] if keepdims else total
    return REDUCERS[op](widen(x), axis=0, keepdims=keepdims).astype(x.dtype)


def _lexicographic(x, op, keepdims):
    pick = jax.lax.max if op == "max" else jax.lax.min
    out = x[0]
    for other in x[1:]:
        # XLA's takes a NaN for a number that is not the one looked for.
        picked = jnp.where(jnp.isnan(other), other, pick(out, other))
        out = jnp.where(jnp.isnan(out), out, picked)
    return out[None] if keepdims else out
