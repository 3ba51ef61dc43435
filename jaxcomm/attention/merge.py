"""Combine attention over two sets of keys into attention over both."""

import jax
import jax.numpy as jnp


def merge(out_a, lse_a, out_b, lse_b):
    """Merge two partial attentions of the same queries, without NaN for empty rows.

    With m = max(lse_a, lse_b), taken as 0 where both are -inf, and w = exp(lse - m):
    lse = m + log(w_a + w_b) and out = (w_a out_a + w_b out_b) / (w_a + w_b). Forms
    built from a sigmoid of the difference give NaN where both sides are -inf.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.

    Args:
      out_a, out_b: (..., D) float32, normalized outputs over each set of keys.
      lse_a, lse_b: (...) float32, logarithms of the sums of exp(score); -inf where a
        row saw no key.

    Returns:
      (out, lse) of the same shapes; rows that saw no key give 0 and -inf.

    >>> lse = jnp.array([0.0])
    >>> merge(jnp.array([[1.0]]), lse, jnp.array([[3.0]]), lse)
    (Array([[2.]], dtype=float32), Array([0.6931472], dtype=float32))
    """
    largest = jnp.maximum(lse_a, lse_b)
    top = jnp.where(jnp.isneginf(largest), 0, largest)
    weight_a, weight_b = jnp.exp(lse_a - top), jnp.exp(lse_b - top)
    total = at_least_half(weight_a + weight_b)
    share = 1 / total
    # On a GPU XLA would compute them anew for every element of out.
    shares = jax.lax.optimization_barrier((weight_a * share, weight_b * share))
    share_a, share_b = (share[..., None] for share in shares)
    return share_a * out_a + share_b * out_b, largest + jnp.log(total)


def at_least_half(total):
    """Return sums of weights, of which the largest is 1, with 0.5 where there is none.

    So that neither an inverse nor a logarithm has a derivative that is not finite.
    """
    return jnp.maximum(total, 0.5)
