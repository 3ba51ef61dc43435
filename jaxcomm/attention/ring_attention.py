"""Exact attention over a sequence that is split across devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import compat
from jaxcomm.attention import arguments, segments
from jaxcomm.attention.differentiate import attend
from jaxcomm.attention.kernels import selection
from jaxcomm.attention.kernels.operands import Terms, sum_dtype
from jaxcomm.attention.layout import Layout
from jaxcomm.attention.positions import both_are_right
from jaxcomm.attention.problem import Problem
from jaxcomm.attention.promotion import promotes_ranks
from jaxcomm.attention.strategies.choice import choose
from jaxcomm.attention.strategies.registry import get_strategy
from jaxcomm.attention.strategies.strategy import Call, Inputs, Strategy
from jaxcomm.communicator.lane import check_lane
from jaxcomm.communicator.replica_groups import canonical_axes
from jaxcomm.compat import varying_axes
from jaxcomm.machine import MACHINES
from jaxcomm.primitives import arguments as _arguments
from jaxcomm.primitives.call import AxisName
from jaxcomm.primitives.call import Call as CollectiveCall
from jaxcomm.primitives.pvary import vary

Array = jax.Array | np.ndarray


@promotes_ranks
def ring_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    axis_name: AxisName,
    layout: Layout,
    positions: Any = None,
    key_layout: Layout | None = None,
    key_positions: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    query_segment_ids: Array | None = None,
    key_value_segment_ids: Array | None = None,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    sinks: Array | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    strategy: str | Strategy = "ring",
    return_residual: bool = False,
    implementation: str | None = None,
    lane: str | None = None,
    backend: str | None = None,
) -> Any:
    """Compute ``jax.nn.dot_product_attention`` over a sequence split across devices.

    For use inside ``jax.shard_map``. ``layout`` says which tokens each rank holds:
    reorder the batch with it in the data pipeline, and pass this rank's ``positions``.
    A call refuses arrays and axes that do not fit the layout, and it compares the
    positions when it runs. Where they are not the layout's, the ``host`` backend
    raises. Other backends return NaN on that rank and wherever its keys are seen.

    Sums are float32 throughout, so the error does not grow with the number of ranks.
    Keys and values with fewer heads travel as they are. The score of a query and a key
    is ``cap(scale * query . key + bias + alibi)``; then comes the mask. A row that sees
    no key gives 0, and its gradients are 0.

    Args:
      query: (B, T, N, H) or (T, N, H) floating, the tokens of this rank.
      key: (B, S, K, H) or (S, K, H), same dtype; K divides N.
      value: (B, S, K, V) or (S, K, V), same dtype.
      bias: floating, broadcasts to (B, N, T, all keys): rows are this rank's queries,
        columns all keys in natural order, without padding. Has a gradient. What is
        below -50,000 hides a key as -inf does, with ``logits_soft_cap`` too.
      mask: bool of such a shape, False for what is not seen.
      axis_name: the mesh axis (or tuple of axes) over which the sequence is split.
      layout: of the sequence.
      positions: int32 (B, T) or (T,), of this rank's tokens, as ``Layout.reorder``
        returned them. If None, the layout must be the natural order of the tokens.
      key_layout: of the keys and values, if they are another sequence.
      key_positions: int32 (B, S) or (S,), of its tokens.
      is_causal: whether a token sees only positions up to its own.
      scale: Python number that multiplies the scores. If None, ``1 / sqrt(H)``.
      query_segment_ids: int (B, T) or (T,), the document of each token. Tokens see
        those of their document alone. A negative id is padding.
      key_value_segment_ids: int (B, S) or (S,). If None, those of the queries.
      query_seq_lengths, key_value_seq_lengths: int (B,). Tokens at this position or
        later are padding.
      local_window_size: how many positions a query sees to its left and right: a pair
        of ints, or an int for both.
      sinks: (N,) floating, a score without a value that joins each row's softmax.
      logits_soft_cap: Python number c: scores become ``c * tanh(score / c)``.
      alibi_slopes: (N,) floating; ``-slope * abs(distance)`` is added to the scores.
      dropout_rate: Python number, the share of the weights that is left out. Which ones
        follows from ``dropout_key``, the row of the batch, the head and both positions,
        whatever the strategy and the number of ranks.
      dropout_key: of ``jax.random``. Equal on the ranks of a sequence; fold the index
        of a data axis into it.
      strategy: what travels: ``"ring"``, ``"all_gather"``, ``"ulysses"``, ``"usp"``,
        ``"halo"``, ``"auto"`` or a ``Strategy``. See ``jaxcomm.attention.plan``.
      return_residual: whether to return the log-sum-exp of the scores as well, sinks
        included.
      implementation: what computes. ``"cudnn"``: cuDNN's fused attention, on CUDA, an
        error where it cannot be had. ``"pallas"``: jaxcomm's kernels, likewise.
        ``"xla"``: XLA, tile by tile. If None, the first of these that can be had.
      lane: which communicator carries the bytes. If None, the default lane.
      backend: what moves the bytes. If None, the backend of the platform.

    Returns:
      (B, T, N, V) or (T, N, V) in the dtype of ``query``. With ``return_residual`` a
      tuple of that and float32 (B, T, N) or (T, N), which is differentiable: -inf for
      rows that see no key. Float64 inputs are summed and have their residual in
      float64.

    Raises:
      ValueError: shapes, layout and axis do not fit together, a name is unknown, or the
        strategy or implementation cannot do this; the latter also when compiled.
      TypeError: a dtype or the type of an option is another, or positions are missing.
      NameError: ``axis_name`` is not bound; call inside ``jax.shard_map``.

    >>> layout = Layout("zigzag", size=4, length=4096)
    >>> def attend(x, positions):
    ...     return ring_attention(
    ...         x, x, x, axis_name="context", layout=layout, positions=positions,
    ...         is_causal=True)
    >>> split = jax.P(None, "context")
    >>> x, positions = layout.reorder(jnp.ones((1, 4096, 4, 64)))
    >>> attend = jax.jit(jax.shard_map(attend, in_specs=split, out_specs=split))
    >>> attend(x, positions).shape
    (1, 4096, 4, 64)
    """
    if isinstance(axis_name, list):
        axis_name = tuple(axis_name)
    axes = canonical_axes(axis_name)
    compat.check_axes_bound(axes, "ring_attention")
    arguments.check_axes(axes)
    is_causal = _arguments.flag(is_causal, "ring_attention: is_causal")
    return_residual = _arguments.flag(
        return_residual, "ring_attention: return_residual"
    )
    if lane is not None:
        check_lane(lane, "ring_attention: lane")
    has_batch, named = arguments.batched({"query": query, "key": key, "value": value})
    query, key, value = named.values()
    arguments.check_arrays(query, key, value)
    arguments.check_are_local(query=query, key=key, value=value)
    batch, queries, heads, head_size = query.shape
    keys = key.shape[1]
    layout = arguments.check_layout(layout, query.shape, "query", "layout")
    name = "layout" if key_layout is None else "key_layout"
    is_one_sequence = key_layout is None
    key_layout = layout if key_layout is None else key_layout
    key_layout = arguments.check_layout(key_layout, key.shape, "key", name)
    size = layout.check_axis(axis_name, "ring_attention")
    key_layout.check_axis(axis_name, "ring_attention")
    window = arguments.window_of(local_window_size, is_causal)
    seen = arguments.mask_of(layout, key_layout, window)
    rank = jax.lax.axis_index(axis_name)

    def with_batch(x, dimensions):
        if x is None:
            return None
        x = jnp.asarray(x)
        return x[None] if not has_batch and x.ndim == dimensions - 1 else x

    ids, key_ids = (
        with_batch(segments.ids_of(x, f"ring_attention: {whose}_segment_ids"), 2)
        for whose, x in (
            ("query", query_segment_ids),
            ("key_value", key_value_segment_ids),
        )
    )
    lengths, key_lengths = (
        with_batch(segments.lengths_of(x), 1)
        for x in (query_seq_lengths, key_value_seq_lengths)
    )
    if (ids is None) != (key_ids is None):
        if not is_one_sequence or ids is None:
            raise ValueError(
                "ring_attention: segment ids were given for "
                f"{'the keys' if ids is None else 'the queries'} alone. Pass both "
                "query_segment_ids and key_value_segment_ids."
            )
        key_ids = ids
    ids = segments.segment_ids_of(
        ids, lengths, layout.positions_of(rank), (batch, queries), "query",
        "ring_attention",
    )  # fmt: skip
    key_ids = segments.segment_ids_of(
        key_ids, key_lengths, key_layout.positions_of(rank), (batch, keys),
        "key_value", "ring_attention",
    )  # fmt: skip
    if ids is not None and key_ids is None:
        key_ids = jnp.zeros((batch, keys), jnp.int32)
    if key_ids is not None and ids is None:
        ids = jnp.zeros((batch, queries), jnp.int32)

    dropout_rate = arguments.check_dropout(dropout_rate, dropout_key)
    of_sums = sum_dtype(query.dtype)
    if sinks is not None:
        sinks = arguments.check_heads(sinks, heads, "sinks").astype(of_sums)
    slopes = None
    if alibi_slopes is not None:
        slopes = arguments.check_heads(alibi_slopes, heads, "alibi_slopes")
        slopes = jnp.broadcast_to(slopes.astype(of_sums), (batch, heads))
    seeds = None
    if dropout_rate and dropout_key is not None:
        seeds = arguments.seeds_of(dropout_key, (batch, heads))
    bias = arguments.bias_of(
        bias, mask, (batch, heads, queries, key_layout.length), key_layout
    )
    problem = Problem(
        query_layout=layout,
        key_layout=key_layout,
        mask=seen,
        batch=batch,
        heads=heads,
        key_heads=key.shape[2],
        head_size=head_size,
        value_size=value.shape[3],
        itemsize=query.dtype.itemsize,
        axis_sizes=tuple(jax.lax.axis_size(axis) for axis in axes),
    )
    soft_cap = arguments.check_soft_cap(logits_soft_cap)
    selection.check_implementation(implementation)
    call = Call(
        axis_name=axis_name,
        size=size,
        mask=seen,
        scale=arguments.check_scale(scale, head_size),
        strategy=_strategy_of(strategy, problem),
        soft_cap=soft_cap,
        dropout_rate=dropout_rate,
        implementation=implementation,
        has_residual=return_residual,
        lane=lane,
        backend=backend,
        bias_dtype=None if bias is None else bias.dtype.name,
        not_fused=_beyond_cudnn(
            {
                "segment ids or sequence lengths": ids,
                "a bias or mask": bias,
                "alibi_slopes": slopes,
                "dropout": seeds,
                "logits_soft_cap": soft_cap,
            }
        ),
    )
    terms = Terms(bias, slopes, seeds)
    inputs = Inputs(query, key, value, ids, key_ids, terms, layout, key_layout)
    is_right = both_are_right(
        (positions, layout),
        (key_positions, None if is_one_sequence else key_layout),
        axis_name,
        **call.via,
    )
    out, residual = attend(call, *_vary_alike((inputs, sinks, is_right), call))
    if not has_batch:
        out, residual = out[0], residual[0]
    return (out, residual) if return_residual else out


def _strategy_of(strategy: str | Strategy, problem: Problem) -> Strategy:
    if strategy == "auto":
        platform = "cpu" if compat.mesh_platform() == "cpu" else "gpu"
        return choose(problem, MACHINES[platform])
    return get_strategy(strategy, problem)


def _beyond_cudnn(given) -> str | None:
    for what, found in given.items():
        if found is not None:
            return f"it is used without {what}"
    return compat.cudnn_attention_mismatch()


def _vary_alike(tree, call: Call):
    """Mark all arrays as varying over the ring and over each other's axes.

    The loop's carries need one type; and the transpose of this mark is what sums the
    gradients of an input that is replicated over one of the axes.
    """
    ring_axes = varying_axes(jax.lax.axis_index(call.axis_name))
    # Under check_vma=False nothing is marked, and shard_map itself sums the gradients.
    if not ring_axes:
        return tree
    axes = ring_axes.union(*map(varying_axes, jax.tree.leaves(tree)))
    leaves, structure = jax.tree.flatten(tree)
    named = CollectiveCall("ring_attention", tuple(sorted(axes)), **call.via)
    return structure.unflatten(vary(leaves, named))
