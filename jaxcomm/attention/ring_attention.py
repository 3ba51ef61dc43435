"""Exact attention over a sequence that is split across devices.

And what other libraries' layers need for it.
"""

# Types as they are written, in help().
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import renamed
from jaxcomm.attention.arguments import AttentionOptions, Keywords, seeds_of
from jaxcomm.attention.kernels.kernel import Kernel
from jaxcomm.attention.layout import Layout, Tokens
from jaxcomm.attention.mask import Ranges
from jaxcomm.attention.on_ranks import Arrays, attend_on_ranks
from jaxcomm.attention.strategies.strategy import KEPT, Strategy
from jaxcomm.primitives.call import AxisName

Array = jax.Array | np.ndarray


@overload
def ring_attention(
    query: Array,
    key: Array,
    value: Array,
    axis_name: AxisName,
    tokens: Tokens | Layout,
    *,
    key_tokens: Tokens | Layout | None = None,
    bias: Array | None = None,
    mask: Array | Ranges | None = None,
    return_residual: Literal[False] = False,
    lane: str | None = None,
    backend: str | None = None,
    **options: Unpack[Keywords],
) -> jax.Array: ...


@overload
def ring_attention(
    query: Array,
    key: Array,
    value: Array,
    axis_name: AxisName,
    tokens: Tokens | Layout,
    *,
    key_tokens: Tokens | Layout | None = None,
    bias: Array | None = None,
    mask: Array | Ranges | None = None,
    return_residual: Literal[True],
    lane: str | None = None,
    backend: str | None = None,
    **options: Unpack[Keywords],
) -> tuple[jax.Array, jax.Array]: ...


@renamed.explained(
    **renamed.DROPOUT,
    axis_name="the mesh axis that splits the tokens, such as 'context'",
    tokens="the tokens of this rank, which Layout.reorder returned with the batch, or a"
    " contiguous Layout",
)
def ring_attention(
    query: Array,
    key: Array,
    value: Array,
    axis_name: AxisName,
    tokens: Tokens | Layout,
    *,
    key_tokens: Tokens | Layout | None = None,
    bias: Array | None = None,
    mask: Array | Ranges | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    sinks: Array | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Array | None = None,
    dropout: tuple[float, Array | None] | None = None,
    strategy: str | Strategy = "auto",
    return_residual: bool = False,
    implementation: str | Kernel | None = None,
    lane: str | None = None,
    backend: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Compute ``jax.nn.dot_product_attention`` over a sequence split across devices.

    For use inside ``jax.shard_map``. ``Layout.reorder`` deals the tokens of a batch to
    the ranks in the data pipeline, and returns ``tokens``, which say where each is:
    pass this rank's. A call refuses arrays and axes that do not fit the tokens' layout,
    and it compares their positions when it runs. Where they are not the layout's, the
    ``host`` backend raises. Other backends return NaN on that rank and wherever its
    keys are seen.

    Sums are float32 throughout, so the error does not grow with the number of ranks.
    Keys and values with fewer heads travel as they are. The score of a query and a key
    is ``cap(scale * query . key + bias + alibi)``; then comes the mask. A row that sees
    no key gives 0, and its gradients are 0.

    Args:
      query: (B, T, N, H) or (T, N, H) floating, the tokens of this rank.
      key: (B, S, K, H) or (S, K, H), same dtype; K divides N.
      value: (B, S, K, V) or (S, K, V), same dtype.
      axis_name: the mesh axis (or tuple of axes) over which the sequence is split.
      tokens: of this rank, as ``Layout.reorder`` returned them with the batch: layout,
        positions and segment ids. Or a contiguous ``Layout``, of tokens that are in
        their natural order.
      key_tokens: of the keys and values, if they are another sequence.
      bias: floating, broadcasts to (B, N, T, all keys): rows are this rank's queries,
        columns all keys in natural order, without padding. Has a gradient. What is
        below -50,000 hides a key as -inf does, with ``logits_soft_cap`` too. No call
        notices rows that were not reordered.
      mask: bool of such a shape, False for what is not seen. Or
        ``jaxcomm.attention.Ranges``, of this rank's queries and keys.
      is_causal: whether a token sees only positions up to its own.
      scale: Python number that multiplies the scores. If None, ``1 / sqrt(H)``.
      local_window_size: how many positions a query sees to its left and right: a pair
        of ints, or an int for both.
      sinks: (N,) floating, a score without a value that joins each row's softmax.
      logits_soft_cap: Python number c: scores become ``c * tanh(score / c)``.
      alibi_slopes: (N,) floating; ``-slope * abs(distance)`` is added to the scores.
      dropout: a pair: a Python number, the share of the weights that is left out, and a
        key of ``jax.random``, equal on the ranks of a sequence. Which weights follows
        from the key, the row of the batch, the head and both positions, whatever the
        strategy and the number of ranks. Rows and heads count from 0 on each rank:
        where other axes split them, fold the indices of those axes into the key.
      strategy: what travels: ``"ring"``, ``"all_gather"``, ``"ulysses"``, ``"usp"``,
        ``"halo"`` or a ``Strategy``. ``"auto"`` is that which a model finds fastest, by
        shapes, options, mesh and platform alone; and the ring where the
        ``implementation`` serves no other. See
        ``jaxcomm.attention.compare_strategies``.
      return_residual: whether to return the log-sum-exp of the scores as well, sinks
        included.
      implementation: what computes. ``"flash"``: FlashAttention-3, on CUDA, an error
        where it cannot be had. ``"cudnn"``: cuDNN's fused attention, likewise.
        ``"pallas"``: jaxcomm's kernels, likewise. ``"xla"``: XLA, tile by tile. Or a
        ``Kernel`` of your own. If None, the first of the four that can be had.
      lane: which communicator carries the bytes. If None, the default lane.
      backend: what moves the bytes. If None, the backend of the platform.

    Returns:
      (B, T, N, V) or (T, N, V) in the dtype of ``query``. With ``return_residual`` a
      tuple of that and float32 (B, T, N) or (T, N), which is differentiable: -inf for
      rows that see no key. Float64 inputs are summed and have their residual in
      float64.

    Raises:
      ValueError: shapes, tokens and axis do not fit together, a name is unknown, or the
        strategy or implementation cannot do this; the latter also when compiled.
      TypeError: a dtype or the type of an option is another, or positions are missing.
      NameError: ``axis_name`` is not bound; call inside ``jax.shard_map``.

    >>> layout = Layout("zigzag", size=4, length=4096)
    >>> def attend(x, tokens):
    ...     return ring_attention(x, x, x, "context", tokens, is_causal=True)
    >>> split = jax.P(None, "context")
    >>> x, tokens = layout.reorder(jnp.ones((1, 4096, 4, 64)))
    >>> attend = jax.jit(jax.shard_map(attend, in_specs=split, out_specs=split))
    >>> attend(x, tokens).shape
    (1, 4096, 4, 64)
    """
    options = AttentionOptions.of(
        "ring_attention",
        is_causal=is_causal,
        scale=scale,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        dropout=dropout,
        strategy=strategy,
        return_residual=return_residual,
        implementation=implementation,
        lane=lane,
        backend=backend,
    )
    seeds = None
    if options.dropout_rate and jnp.ndim(query) in (3, 4):  # others are refused below
        seeds = seeds_of(dropout, query, options.what)
    arrays = Arrays(query, key, value, bias, mask, sinks, alibi_slopes, seeds)
    return attend_on_ranks(options, arrays, axis_name, tokens, key_tokens)


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
