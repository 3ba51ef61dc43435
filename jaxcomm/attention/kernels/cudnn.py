"""The two calls of cuDNN's fused attention, which only programs for CUDA can make."""

from jaxcomm import compat


def forward(
    query, key, value, *, scale: float, is_causal: bool, left: int | None = None
):
    """Compute attention.

    Args:
      query: (B, T, N, D) bfloat16 or float16.
      key, value: (B, S, K, D) of the same dtype; K divides N.
      scale: factor on the scores.
      is_causal: whether query i sees only keys 0 to i. Else it sees all.
      left: if causal, how many keys before its own a query sees; None for all.

    Returns:
      (out, lse): (B, T, N, D) in that dtype, and (B, N, T) float32, the natural
      logarithm of the sum of exp(scale * query . key).
    """
    options = {"scale": scale, "is_causal": is_causal, "left": left}
    return compat.call_cudnn_attention(query, key, value, is_backward=False, **options)


def backward(
    query,
    key,
    value,
    lse,
    out,
    grad_out,
    *,
    scale: float,
    is_causal: bool,
    left: int | None = None,
):
    """Compute the gradients of query, key and value, in their dtype.

    Args:
      query, key, value, scale, is_causal, left: as in :func:`forward`.
      lse, out: what that returned; or the same over more keys than these, and the
        gradients are what these keys contribute.
      grad_out: like ``out``.
    """
    saved = (lse, out, grad_out)
    options = {"scale": scale, "is_causal": is_causal, "left": left}
    return compat.call_cudnn_attention(
        query, key, value, *saved, is_backward=True, **options
    )
