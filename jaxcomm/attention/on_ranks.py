"""Attend inside shard_map: what both public functions have in common."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm import compat
from jaxcomm.attention import arguments
from jaxcomm.attention.arguments import AttentionOptions
from jaxcomm.attention.kernels.kernel import Hop, finite, is_empty, merge, sum_dtype
from jaxcomm.attention.kernels.scores import Scores
from jaxcomm.attention.kernels.selection import Refused
from jaxcomm.attention.mask import Ranges, promotes_ranks, ranges_of
from jaxcomm.attention.pairs import Pairs
from jaxcomm.attention.permutation import poison_unless
from jaxcomm.attention.positions import (
    all_are_right,
    held_tokens,
    ids_of_both,
    table_of_rank,
    with_padding,
)
from jaxcomm.attention.strategies.choice import get_strategy
from jaxcomm.attention.strategies.strategy import (
    AttentionCall,
    Inputs,
    Problem,
    Saved,
    Strategy,
    inner,
    keep,
    rounded,
)
from jaxcomm.attention.strategies.walk import Ring
from jaxcomm.attention.tokens import Tokens
from jaxcomm.primitives.call import SCOPE, Call, call_of
from jaxcomm.primitives.pvary import vary


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: AttentionCall, inputs: Inputs, sinks, is_right):
    """Attend by the strategy of the call.

    Args:
      call: what is known before.
      inputs: the arrays of this rank.
      sinks: (N,) in the dtype of sums, or None.
      is_right: bool scalar, whether this rank holds the tokens that its layout says, or
        None if it does. Otherwise results and gradients are NaN here, and on each rank
        that sees a key of this one.

    Returns:
      (out, lse): (B, T, N, V) in the dtype of the query, (B, T, N) in that of sums,
      which is :func:`finite`.
    """
    return _forward(call, inputs, sinks, is_right)[0]


@promotes_ranks
def _forward(call: AttentionCall, inputs: Inputs, sinks, is_right):
    inputs = inputs._replace(is_right=is_right)
    if not call.strategy.judges:
        inputs = inputs.gathered(call).poisoned()
    # JAX traces both rules when it differentiates: the caller's scope may be gone.
    with SCOPE(call.scope):
        (out, lse), kept = call.strategy.forward(call, inputs)
    if sinks is not None:
        # A sink is a key that every row sees, with a value of zeros.
        of_sinks = jnp.broadcast_to(sinks, lse.shape)
        out = out.astype(lse.dtype)
        out, lse = merge((out, lse), (jnp.zeros_like(out), of_sinks))
    out, lost = rounded(call, inputs, out)
    if not _all_see_themselves(call, out):
        out = poison_unless(is_right, out)
    out, lost, lse = keep((out, lost, finite(poison_unless(is_right, lse))))
    return (out, lse), (kept, out, lost, lse, sinks, is_right)


def _all_see_themselves(call: AttentionCall, out) -> bool:
    """Say whether results of wrong tokens are NaN without a pass over each.

    A query sees its own key, which is NaN then; and a key's weights are NaN if the
    log-sum-exp is. That is not so of padding of the layout, which sees nothing, where a
    bias or a range may hide the own key, and where dropout may leave out all that see a
    value. Of segment ids see ``Inputs.poisoned``.
    """
    is_whole = call.mask.query_length == call.size * out.shape[1]
    hides = call.bias_dtype is not None or call.has_ranges
    hides = hides or call.hop.scores.dropout_rate
    return call.is_self and is_whole and not hides


@promotes_ranks
def _backward(call: AttentionCall, residuals, grads):
    kept, out, lost, lse, sinks, is_right = residuals
    grad_out, grad_lse = grads
    # Once, not per hop. A score moves lse by its weight, hence the second term.
    delta = inner(grad_out, out, lost, lse.dtype) - grad_lse
    with SCOPE(call.scope):
        found = call.strategy.backward(call, kept, Saved(grad_out, out, lse, delta))
    grad_sinks = None
    if sinks is not None:
        # 0 of a sink of -inf, also in a row that saw nothing: lse is finite.
        weights = jnp.exp(sinks - lse)
        grad_sinks = -(weights * delta).sum((0, 1))
    dtype = out.dtype
    bias = found.bias
    if bias is not None:
        bias = bias.astype(call.bias_dtype)
    grads = (
        Inputs(
            query=found.query.astype(dtype),
            key=found.key.astype(dtype),
            value=found.value.astype(dtype),
            query_ids=None,
            key_ids=None,
            bias=bias,
            slopes=found.slopes,
            seeds=None,
            query_layout=None,  # pyright: ignore[reportArgumentType]
            key_layout=None,  # pyright: ignore[reportArgumentType]
        ),
        grad_sinks,
    )
    if not _all_see_themselves(call, out):
        grads = poison_unless(is_right, grads)
    return *grads, None


_attend.defvjp(_forward, _backward)
# Where the caller compiles nothing, JAX compiles every operation by itself, and loops
# anew at each call: this makes one of all.
attend = jax.jit(_attend, static_argnums=0)


class Arrays(NamedTuple):
    """The arrays of a call, of one rank.

    Attributes:
      query, key, value: (B, T, N, H), (B, S, K, H), (B, S, K, V), or all without B.
      bias, mask: as in ``ring_attention``; a mask may be ``Ranges``.
      sinks, alibi_slopes: (N,) or None.
      seeds: uint32 (B, N) of dropout, or None.
    """

    query: Any
    key: Any
    value: Any
    bias: Any = None
    mask: Any = None
    sinks: Any = None
    alibi_slopes: Any = None
    seeds: Any = None


@promotes_ranks
def attend_on_ranks(
    options: AttentionOptions, arrays: Arrays, axis_name, tokens, key_tokens=None
) -> Any:
    """Attend over what the ranks of an axis hold.

    Returns:
      What ``ring_attention`` returns.
    """
    what = options.what
    named = call_of(what, axis_name, lane=options.lane, backend=options.backend)
    axis_name = named.axes[0] if len(named.axes) == 1 else named.axes
    arguments.check_axes(named.axes, what)
    has_batch, of_tokens = arguments.batched(what, *arrays[:3])
    arrays = arrays._replace(**of_tokens)
    arguments.check_arrays(what, **of_tokens)
    arguments.check_are_local(what, **of_tokens)
    arguments.check_are_split(
        what, named.axes, key=of_tokens["key"], value=of_tokens["value"]
    )
    # The backward pass uses it too: see `AttentionCall.scope`.
    with SCOPE(named.scope):
        # With a table few strategies need the order of others; and a bias does.
        needs_order = key_tokens, arrays.bias, arrays.mask
        of_all = any(x is not None for x in needs_order)
        of_all |= getattr(tokens, "table", None) is None
        queries = held_tokens(
            tokens, arrays.query, axis_name, what, "query", "tokens", of_all
        )
        keys = None
        if key_tokens is not None:
            keys = held_tokens(
                key_tokens, arrays.key, axis_name, what, "key", "key_tokens"
            )
        elif arrays.key.shape[1] != arrays.query.shape[1]:
            raise ValueError(
                f"{what}: key has {arrays.key.shape[1]} tokens on this rank, and query "
                f"{arrays.query.shape[1]}. Pass key_tokens, which are those of the "
                "keys."
            )
        layouts = queries[1], (keys or queries)[1]
        has_documents = queries[0].segment_ids is not None
        problem = _problem(options, arrays, *layouts, named, has_documents)
        inputs, sinks = _inputs(what, arrays, queries, keys or queries)
        rank = jax.lax.axis_index(axis_name)
        inputs = inputs._replace(
            query_ids=with_padding(inputs.query_ids, inputs.query_layout, rank),
            key_ids=with_padding(inputs.key_ids, inputs.key_layout, rank),
        )
        call_of_options = functools.partial(
            _call, problem=problem, inputs=inputs, sinks=sinks, axis_name=axis_name,
            named=named, is_self=keys is None, tokens=queries[0],
        )  # fmt: skip
        call = call_of_options(options)
        is_right = all_are_right(queries, keys, axis_name, what)
        everything = vary_alike((inputs, sinks, is_right), named)
        try:
            out, residual = attend(call, *everything)
        except Refused:
            if options.strategy != "auto" or isinstance(call.strategy, Ring):
                raise
            # Its hops are those that most kernels know.
            options = dataclasses.replace(options, strategy=Ring())
            call = call_of_options(options)
            out, residual = attend(call, *everything)
    if not has_batch:
        out, residual = out[0], residual[0]
    if not options.has_residual:
        return out
    return out, jnp.where(is_empty(residual), -jnp.inf, residual)


def _inputs(what: str, arrays: Arrays, queries, keys):
    """Return the arrays of a strategy, and the sinks in the dtype of sums."""
    (tokens, layout), (key_tokens, key_layout) = queries, keys
    query = arrays.query
    batch, count, heads, _ = query.shape
    ids, key_ids = ids_of_both(
        tokens, key_tokens, (query.shape[:2], arrays.key.shape[:2]), what
    )
    sinks = arguments.check_heads(arrays.sinks, heads, "sinks", what)
    slopes = arguments.check_heads(arrays.alibi_slopes, heads, "alibi_slopes", what)
    of_sums = sum_dtype(query.dtype)
    if slopes is not None:
        slopes = jnp.broadcast_to(slopes.astype(of_sums), (batch, heads))
    mask, ranges = arrays.mask, Ranges()
    if isinstance(mask, Ranges):
        shapes = query.shape[:2], arrays.key.shape[:2]
        mask, ranges = None, ranges_of(mask, *shapes, what)
    bias = arguments.bias_of(
        arrays.bias,
        mask,
        (batch, heads, count, key_layout.length),
        key_layout,
        what,
    )
    inputs = Inputs(
        *(query, arrays.key, arrays.value, ids, key_ids),
        *(bias, slopes, arrays.seeds, layout, key_layout),
        table=table_of_rank(tokens, batch, what) if tokens is key_tokens else None,
        query_range=ranges.keys,
        key_range=ranges.queries,
    )
    return inputs, None if sinks is None else sinks.astype(of_sums)


def _problem(
    options, arrays, layout, key_layout, named, has_documents: bool
) -> Problem:
    batch, _, heads, head_size = arrays.query.shape
    return Problem(
        query_layout=layout,
        key_layout=key_layout,
        mask=arguments.mask_of(layout, key_layout, options.window),
        has_documents=has_documents,
        batch=batch,
        heads=heads,
        key_heads=arrays.key.shape[2],
        head_size=head_size,
        value_size=arrays.value.shape[3],
        itemsize=arrays.query.dtype.itemsize,
        axis_sizes=tuple(jax.lax.axis_size(axis) for axis in named.axes),
        has_bias=arrays.bias is not None or arrays.mask is not None,
    )


def _call(
    options: AttentionOptions,
    problem: Problem,
    inputs: Inputs,
    sinks,
    axis_name,
    named,
    is_self: bool,
    tokens: Tokens,
) -> AttentionCall:
    """Return what strategies know of a call before they see an array."""
    bias, scale = inputs.bias, options.scale
    hop = Hop(
        pairs=Pairs(problem.mask),
        scores=Scores(
            scale=problem.head_size**-0.5 if scale is None else scale,
            soft_cap=options.soft_cap,
            dropout_rate=options.dropout_rate,
        ),
        has_residual=options.has_residual,
        kernels=options.kernels,
    )
    strategy = get_strategy(options.strategy, problem, options.what)
    asked = _asked(options.what, hop, strategy, inputs, sinks, tokens)
    return AttentionCall(
        axis_name=axis_name,
        size=problem.size,
        hop=hop,
        strategy=strategy,
        scope=dataclasses.replace(named.scope, part_of=asked),
        bias_dtype=None if bias is None else bias.dtype.name,
        is_self=is_self,
        has_ranges=inputs.has_ranges,
        way=tokens.way,
        sizes=tokens.sizes,
    )


def _asked(
    what: str, hop: Hop, strategy: Strategy, inputs: Inputs, sinks, tokens
) -> str:
    """Return a call with what all ranks must have asked for, to be compared.

    Options by their effect: a window that reaches the first key is none. The same on
    every process: no object is in it but numbers and names.
    """
    mask, of_strategy = hop.pairs.mask, getattr(strategy, "__dataclass_fields__", ())
    has_window = mask.left is not None or mask.right not in (0, None)
    arrays = {
        "documents": inputs.query_ids, "bias": inputs.bias, "sinks": sinks,
        "alibi_slopes": inputs.slopes, "key_ranges": inputs.query_range,
        "query_ranges": inputs.key_range,
    }  # fmt: skip
    numbers = {name: getattr(strategy, name) for name in of_strategy}
    asked: dict[str, Any] = {
        "scale": hop.scores.scale,
        "is_causal": mask.right == 0 or None,
        "local_window_size": (mask.left, mask.right) if has_window else None,
        "logits_soft_cap": hop.scores.soft_cap,
        "dropout": hop.scores.dropout_rate or None,
        **{name: True for name, x in arrays.items() if x is not None},
        "strategy": strategy.name,
        **{name: x for name, x in numbers.items() if isinstance(x, (int, str))},
        "length": mask.query_length,
        "schedule": inputs.query_layout.schedule.name,
        "tokens.way": tokens.way,
    }
    if strategy.name == "halo" and tokens.sizes is not None:
        asked["tokens.sizes.are_mixed"] = tokens.sizes.are_mixed
    if inputs.key_layout != inputs.query_layout:
        asked["key_length"] = mask.key_length
        asked["key_schedule"] = inputs.key_layout.schedule.name
    found = (f"{name}={x!r}" for name, x in asked.items() if x is not None)
    return f"{what}({', '.join(found)})"


def vary_alike(tree, named: Call):
    """Mark all arrays as varying over the ring and over each other's axes.

    The loop's carries need one type; and the transpose of this mark is what sums the
    gradients of an input that is replicated over one of the axes.
    """
    ring_axes = compat.varying_axes(jax.lax.axis_index(named.axes))
    # Under check_vma=False nothing is marked, and shard_map itself sums the gradients.
    if not ring_axes:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    each = [compat.varying_axes(x) for x in leaves]
    axes = ring_axes.union(*each)
    if set(each) == {axes}:
        return tree
    over_all = named.replace(axes=tuple(sorted(axes)))
    return structure.unflatten(vary(leaves, over_all))
