"""What other libraries' layers need to attend over a split sequence."""

import jax

from jaxcomm.attention.layout import Layout
from jaxcomm.attention.names import KEPT
from jaxcomm.attention.ring_attention import ring_attention

_keep = jax.checkpoint_policies.save_only_these_names(KEPT)


def save_attention(prim, *_, **params):
    """Decide what ``jax.checkpoint(policy=save_attention)`` keeps: the attention.

    The backward pass computes the layer again, without its attention.
    """
    return _keep(prim, *_, **params)


def attention_fn(axis_name, layout: Layout, *, is_causal: bool = False, **options):
    """Return :func:`ring_attention` with the signature of flax's ``attention_fn``.

    For ``flax.nnx.MultiHeadAttention`` and ``flax.linen.MultiHeadDotProductAttention``,
    inside ``jax.shard_map``. equinox and others that attend to one sequence call
    ``ring_attention`` with 3 dimensions under ``jax.vmap``.

    Args:
      axis_name: the mesh axis, or tuple of axes, that splits the sequence.
      layout: of the sequence.
      is_causal: whether a token sees only positions up to its own. A causal mask made
        of one rank's tokens would be wrong.
      options: of ``ring_attention``.

    Returns:
      A function of query, key and value, and of what flax passes.

    >>> attend = attention_fn("context", Layout("zigzag", 8, 4096), is_causal=True)
    >>> x = jnp.ones((1, 512, 4, 64))  # of one of 8 ranks
    """
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
            bias,
            mask,
            axis_name=axis_name,
            layout=layout,
            is_causal=always or is_causal,
            dropout_rate=dropout_rate if drops else 0.0,
            dropout_key=dropout_rng if drops else None,
            **options,
        )

    return attend
