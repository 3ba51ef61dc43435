"""What other libraries' layers need to attend over a split sequence."""

from collections.abc import Callable
from typing import Any

import jax

from jaxcomm import renamed
from jaxcomm.attention.layout import Layout, Tokens
from jaxcomm.attention.ring_attention import ring_attention
from jaxcomm.attention.strategies.strategy import KEPT
from jaxcomm.primitives.call import AxisName

_keep = jax.checkpoint_policies.save_only_these_names(KEPT)


def save_attention(prim: Any, *_: Any, **params: Any) -> Any:
    """Decide what ``jax.checkpoint(policy=save_attention)`` keeps: the attention.

    The backward pass computes the layer again, without its attention.
    """
    return _keep(prim, *_, **params)


def attention_fn(
    axis_name: AxisName,
    tokens: Tokens | Layout,
    *,
    is_causal: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """Return :func:`ring_attention` with the signature of flax's ``attention_fn``.

    For ``flax.nnx.MultiHeadAttention`` and ``flax.linen.MultiHeadDotProductAttention``,
    inside ``jax.shard_map``, where the tokens are. All layers of an nnx model take
    it by ``model.set_attributes(attention_fn=attention_fn(...))``.

    Args:
      axis_name: the mesh axis, or tuple of axes, that splits the sequence.
      tokens: of this rank, as in ``ring_attention``.
      is_causal: whether a token sees only positions up to its own. A causal mask made
        of one rank's tokens would be wrong.
      options: of ``ring_attention``. ``bias``, ``mask`` and dropout are no options: the
        layer passes them to the function. Nor is ``return_residual``: the layer takes
        one array.

    Returns:
      A function of query, key and value, and of what flax passes.

    Raises:
      TypeError: an option is one that the layer passes, or ``return_residual``.

    >>> def apply(layer, params, x, tokens):  # flax.linen, inside shard_map
    ...     attend = attention_fn("context", tokens, is_causal=True)
    ...     return layer.clone(attention_fn=attend).apply(params, x)
    """
    for name in ("bias", "mask", "dropout", *renamed.DROPOUT):
        if name in options:
            raise TypeError(
                f"attention_fn: {name} is no option, because the layer passes it to "
                "the function that attention_fn returns. Set dropout in the layer. For "
                "a bias or mask, wrap that function."
            )
    if "return_residual" in options:
        raise TypeError(
            "attention_fn: return_residual is no option, because the layer takes one "
            "array. For the log-sum-exp call jaxcomm.ring_attention."
        )
    always = is_causal

    def attend(
        query,
        key,
        value,
        bias=None,
        mask=None,
        *,
        broadcast_dropout: bool = True,
        dropout_rng=None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype=None,
        precision=None,
        module=None,
        is_causal: bool = False,
    ):
        drops = bool(dropout_rate) and not deterministic
        for what, is_asked, advice in (
            ("precision", precision is not None, "Leave it None: sums are float32."),
            ("sow_weights", module is not None, "The weights are never in memory."),
            ("broadcast_dropout", drops and broadcast_dropout, "Pass False."),
        ):
            if is_asked:
                raise ValueError(f"attention_fn: {what} is not possible. {advice}")
        if dtype is not None:
            query, key, value = (x.astype(dtype) for x in (query, key, value))
        return ring_attention(
            query,
            key,
            value,
            axis_name,
            tokens,
            bias=bias,
            mask=mask,
            is_causal=always or is_causal,
            dropout=(dropout_rate, dropout_rng) if drops else None,
            **options,
        )

    return attend
