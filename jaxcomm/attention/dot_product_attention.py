"""Attention for plain jit: arrays in natural order, split over a mesh."""

# Types as they are written, in help().
from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import compat, renamed
from jaxcomm.attention import arguments, natural, permutation
from jaxcomm.attention.arguments import AttentionOptions, Keywords
from jaxcomm.attention.kernels.kernel import Kernel
from jaxcomm.attention.layout import Layout, Tokens
from jaxcomm.attention.mask import Ranges, ranges_of
from jaxcomm.attention.natural import Split
from jaxcomm.attention.on_ranks import Arrays, attend_on_ranks
from jaxcomm.attention.permutation import token_numbers
from jaxcomm.attention.positions import TRUSTED
from jaxcomm.attention.relayout import relayout
from jaxcomm.attention.strategies.strategy import Strategy
from jaxcomm.communicator import cache

Array = jax.Array | np.ndarray
_NAME = "dot_product_attention"


@overload
def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | Ranges | None = None,
    *,
    sharding: jax.P | jax.NamedSharding,
    segment_ids: Array | tuple[Array, Array] | None = None,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    return_residual: Literal[False] = False,
    **options: Unpack[Keywords],
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | Ranges | None = None,
    *,
    sharding: jax.P | jax.NamedSharding,
    segment_ids: Array | tuple[Array, Array] | None = None,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    return_residual: Literal[True],
    **options: Unpack[Keywords],
) -> tuple[jax.Array, jax.Array]: ...


@renamed.explained(
    **renamed.DROPOUT,
    axis_name="these axes in sharding=jax.P(batch, tokens, heads)",
    batch_axes="these axes in sharding=jax.P(batch, tokens, heads)",
    head_axes="these axes in sharding=jax.P(batch, tokens, heads)",
    mesh="sharding=jax.NamedSharding(mesh, jax.P(batch, tokens, heads))",
    sharding="sharding=jax.P(batch, tokens, heads), the mesh axes that split query",
)
def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | Ranges | None = None,
    *,
    sharding: jax.P | jax.NamedSharding,
    is_causal: bool = False,
    scale: float | None = None,
    segment_ids: Array | tuple[Array, Array] | None = None,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    sinks: Array | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Array | None = None,
    dropout: tuple[float, Array | None] | None = None,
    strategy: str | Strategy = "auto",
    return_residual: bool = False,
    implementation: str | Kernel | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Compute ``jax.nn.dot_product_attention`` over a mesh, in plain jit code.

    A twin for global arrays in their natural order. It splits tokens, batch and heads
    over axes of the mesh, and calls :func:`ring_attention` inside ``jax.shard_map``, so
    that no device computes what another does. A causal ring moves tokens into zigzag
    and back, an all-to-all each: a model that reorders its tokens once and calls
    ``ring_attention`` itself saves them.

    Args:
      query: (B, T, N, H) or (T, N, H) floating.
      key: (B, S, K, H) or (S, K, H), same dtype; K divides N.
      value: (B, S, K, V) or (S, K, V), same dtype.
      bias, mask: broadcast to (B, N, T, S). What is below -50,000 in ``bias`` hides a
        key, as in ``ring_attention``. A mask may be ``jaxcomm.attention.Ranges``.
      sharding: how to split ``query`` over the mesh of ``jax.set_mesh``: ``jax.P(batch,
        tokens, heads)``, or ``jax.P(tokens, heads)`` without a batch. Or a
        ``jax.NamedSharding`` with its mesh. For batch and heads, None stands for the
        Explicit axes by which the type of ``query`` splits them. All devices along the
        axes of the batch compute a batch of one sequence. Key heads that the axes of
        the heads do not divide are repeated until they do.
      is_causal: whether a token sees only positions up to its own.
      segment_ids: int (B, T), the document of each token; negative for padding. Or a
        pair of those of the queries, (B, T), and those of the keys, (B, S).
      query_seq_lengths, key_value_seq_lengths: int (B,).
      dropout: as in ``ring_attention``. What is left out does not depend on the mesh.
      strategy: as in ``ring_attention``.
      return_residual: whether to return the log-sum-exp as well.
      scale, local_window_size, sinks, logits_soft_cap: as in ``ring_attention``.
      alibi_slopes, implementation: as in ``ring_attention``.

    Returns:
      (B, T, N, V) or (T, N, V), or a tuple of that and (B, T, N) or (T, N). Split as
      the queries; tokens that the axes do not divide are whole on each device.

    Raises:
      TypeError: ``sharding`` is missing or none of these; or as ``ring_attention``.
      ValueError: there is no mesh, nothing says what an axis of several devices splits,
        axes do not divide what they split, or ``bias`` or ``mask`` do not broadcast; or
        as ``ring_attention``.

    >>> @jax.jit
    ... def attend(x):
    ...     return dot_product_attention(
    ...         x, x, x, sharding=jax.P("data", "context"), is_causal=True)
    >>> with jax.set_mesh(jax.make_mesh((2, 4), ("data", "context"))):
    ...     out = attend(jnp.ones((2, 512, 4, 64)))
    >>> out.shape
    (2, 512, 4, 64)
    """
    options = AttentionOptions.of(
        _NAME,
        is_causal=is_causal,
        scale=scale,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        dropout=dropout,
        strategy=strategy,
        return_residual=return_residual,
        implementation=implementation,
        lane=None,
        backend=None,
    )
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    # Of whole arrays: padding would hide it.
    arguments.check_arrays(_NAME, **arguments.batched(_NAME, query, key, value)[1])
    split = Split.of(sharding, query)
    ids, key_ids = _ids(
        query, key, segment_ids, (query_seq_lengths, key_value_seq_lengths)
    )
    ranges = Ranges()
    if isinstance(mask, Ranges):
        shapes = query.shape[:-2], key.shape[:-2]
        mask, ranges = None, ranges_of(mask, *shapes, _NAME)
    known = (ids, ranges.keys), (key_ids, ranges.queries)
    seeds = None
    if options.dropout_rate:
        seeds = arguments.seeds_of(dropout, query, _NAME)
    arrays = Arrays(
        query,
        key,
        value,
        natural.pairs_of(bias, "bias", query, key),
        natural.pairs_of(mask, "mask", query, key),
        arguments.check_heads(sinks, query.shape[-2], "sinks", _NAME),
        arguments.check_heads(alibi_slopes, query.shape[-2], "alibi_slopes", _NAME),
        seeds,
    )
    # A causal ring is balanced in zigzag, and so are prefixes and trees; a window needs
    # neighbours beside each other.
    has_ranges = ranges.keys is not None or ranges.queries is not None
    is_balanced = (is_causal or has_ranges) and local_window_size is None
    call = _Compiled(options, split, "zigzag" if is_balanced else "contiguous")
    if compat.is_staging():
        return _attend(arrays, known, call)
    # Each of its operations would be compiled by itself.
    return _program(call, cache.choices_of(split.mesh))(arrays, known)


def _ids(query, key, ids, lengths):
    """Return int32 documents of queries and of keys.

    Returns:
      Both or none of them; or of the queries alone, if the keys have the same.
    """
    is_pair = isinstance(ids, (tuple, list))
    if is_pair and len(ids) != 2:
        raise ValueError(
            f"{_NAME}: segment_ids is a {type(ids).__name__} of {len(ids)}. Pass an "
            "array, or a pair: those of the queries and those of the keys."
        )
    if not is_pair and ids is not None and query.shape[:-2] != key.shape[:-2]:
        raise ValueError(
            f"{_NAME}: query has {query.shape[-3]} tokens and key {key.shape[-3]}. "
            "Pass a pair as segment_ids: those of the queries and those of the keys."
        )
    are_same = not is_pair and lengths[0] is lengths[1]
    ids = tuple(ids) if is_pair else (ids, ids)
    found = [
        permutation.natural_ids(of, ends, token_numbers(x, x.ndim - 3), _NAME, whose)
        for x, of, ends, whose in zip(
            (query, key), ids, lengths, ("query_", "key_value_"), strict=True
        )
    ]
    if found[0] is None and found[1] is None:
        return None, None
    if are_same and query.shape[:-2] == key.shape[:-2]:
        return jnp.asarray(found[0]), None
    return [
        jnp.zeros(x.shape[:-2], jnp.int32) if of is None else jnp.asarray(of)
        for x, of in zip((query, key), found, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class _Compiled:
    """What a call is compiled for, besides its arrays' types."""

    options: AttentionOptions
    split: Split
    schedule: str


def _attend(arrays: Arrays, known, call: _Compiled) -> Any:
    """Split a call over the mesh.

    Args:
      known: of the tokens of the queries, and of the keys: their documents, and a
        ``Range``; each None if there is none.
    """
    split, axes = call.split, call.split.tokens
    size = split.size(axes)
    has_batch = arrays.query.ndim == 4
    lead = (split.batch or None,) if has_batch else ()
    heads = split.heads or None
    at = len(lead)  # the dimension of tokens
    layouts, plain = (
        [Layout(schedule, size, x.shape[at]) for x in (arrays.query, arrays.key)]
        for schedule in (call.schedule, "contiguous")
    )

    def pairs(x):
        """Return how a bias or mask is split: dimensions of 1 are whole."""
        names = (*lead, heads, axes, None)
        return jax.P(
            *(n if count > 1 else None for n, count in zip(names, x.shape, strict=True))
        )

    of_tokens, of_known = jax.P(*lead, axes, heads), jax.P(*lead, axes)
    specs = Arrays(
        query=of_tokens,
        key=of_tokens,
        value=of_tokens,
        bias=None if arrays.bias is None else pairs(arrays.bias),
        mask=None if arrays.mask is None else pairs(arrays.mask),
        sinks=jax.P(heads),
        alibi_slopes=jax.P(heads),
        seeds=jax.P(split.batch or None, heads),
    )
    arrays = arrays._replace(
        **{name: natural.repeated_heads(getattr(arrays, name), split)
           for name in ("key", "value")}
    )  # fmt: skip
    rows = arrays.query.ndim - 2  # the dimension of queries in a bias
    of_rows = [
        None if x is None or x.shape[rows] == 1 else rows
        for x in (arrays.bias, arrays.mask)
    ]

    def placed(x, spec, axis: int | None):
        return split.placed(_padded(x, axis, spec, split), spec)

    axes_of_tokens = at, at, at, *of_rows, None, None, None
    arrays = Arrays(*map(placed, arrays, specs, axes_of_tokens))
    known = jax.tree.map(lambda x: placed(x, of_known, at), known)
    move = functools.partial(relayout, axis_name=axes)

    def local(arrays: Arrays, known):
        def deal(x, of: int, axis: int = at):
            if x is None:
                return None
            return move(x, Tokens(plain[of], TRUSTED), layouts[of], axis=axis)

        def deal_rows(x):
            return x if x is None or x.shape[rows] == 1 else deal(x, 0, rows)

        dealt = arrays._replace(
            query=deal(arrays.query, 0),
            key=deal(arrays.key, 1),
            value=deal(arrays.value, 1),
            bias=deal_rows(arrays.bias),
            mask=deal_rows(arrays.mask),
        )
        (ids, of_queries), (key_ids, of_keys) = (
            jax.tree.map(functools.partial(deal, of=of), x)
            for of, x in enumerate(known)
        )
        if of_queries is not None or of_keys is not None:
            dealt = dealt._replace(mask=Ranges(of_queries, of_keys))
        tokens, key_tokens = (
            Tokens(layout, TRUSTED, x)
            for layout, x in zip(layouts, (ids, key_ids), strict=True)
        )
        if layouts[0] == layouts[1] and key_ids is None:
            key_tokens = None
        found = attend_on_ranks(call.options, dealt, axes, tokens, key_tokens)
        return move(found, Tokens(layouts[0], TRUSTED), plain[0], axis=at)

    found = jax.shard_map(
        local,
        mesh=split.mesh,
        in_specs=(specs, of_known),
        out_specs=of_tokens,
        axis_names=split.axis_names,
    )(arrays, known)
    length = plain[0].length
    return jax.tree.map(lambda x: _cut(x, at, length, of_tokens, split), found)


def _padded(x, axis: int | None, spec, split: Split):
    """Fill a dimension with zeros up to what the ranks hold."""
    size = split.size(split.tokens)
    if x is None or axis is None or not x.shape[axis] % size:
        return x
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % size)
    return jnp.pad(split.whole(x, spec, axis), padding)


def _cut(x, axis: int, length: int, spec, split: Split):
    """Undo :func:`_padded`."""
    if x.shape[axis] == length:
        return x
    if split.is_typed:
        # What is left cannot be split evenly.
        x = split.whole(x, spec, axis)
    x = jax.lax.slice_in_dim(x, 0, length, axis=axis)
    return split.whole(x, spec, axis)


class _Program:
    """A call outside of jit, compiled; anew once a communicator of it is closed."""

    def __init__(self, call: _Compiled):
        self._call = call
        self._used: set[int] = set()
        self._run = self._made()

    def _made(self):
        return jax.jit(functools.partial(_attend, call=self._call))

    def __call__(self, *arrays):
        if not cache.are_live(self._used):
            self._used, self._run = set(), self._made()
        with cache.used_here() as used:
            found = self._run(*arrays)
        self._used |= used
        return found


@functools.lru_cache(maxsize=64)
def _program(call: _Compiled, choices) -> _Program:
    """Return the program of a call, for what ``init`` chose."""
    return _Program(call)
