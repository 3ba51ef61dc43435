"""Attention for plain jit: arrays in natural order, split over a mesh by JAX."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import compat
from jaxcomm.attention import natural, segments
from jaxcomm.attention.layout import Layout
from jaxcomm.attention.positions import TRUSTED
from jaxcomm.attention.relayout import relayout
from jaxcomm.attention.ring_attention import ring_attention
from jaxcomm.attention.strategies.strategy import Strategy
from jaxcomm.communicator import cache
from jaxcomm.primitives.arguments import flag

Array = jax.Array | np.ndarray
# Of the options of ring_attention, those that are arrays.
_TRAINED = ("alibi_slopes", "dropout_key", "sinks")


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    axis_name: str | tuple[str, ...],
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    is_causal: bool = False,
    query_segment_ids: Array | None = None,
    key_value_segment_ids: Array | None = None,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    strategy: str | Strategy = "auto",
    schedule: str | None = None,
    return_residual: bool = False,
    **options: Any,
) -> Any:
    """Compute ``jax.nn.dot_product_attention`` over a mesh, in plain jit code.

    A twin for global arrays in their natural order. It splits the sequence over the
    axis, calls :func:`ring_attention` inside ``jax.shard_map``, and leaves the other
    axes of the mesh to JAX. A causal ring moves tokens into zigzag and back, an
    all-to-all each: a model that reorders its tokens once and calls ``ring_attention``
    itself saves them.

    Args:
      query: (B, T, N, H) or (T, N, H) floating.
      key: (B, S, K, H) or (S, K, H), same dtype; K divides N.
      value: (B, S, K, V) or (S, K, V), same dtype.
      bias, mask: broadcast to (B, N, T, S). What is below -50,000 in ``bias`` hides a
        key, as in ``ring_attention``.
      axis_name: the mesh axis, or tuple of axes, to split the sequence over.
      mesh: the mesh. If None, that of ``jax.set_mesh``.
      is_causal: whether a token sees only positions up to its own.
      query_segment_ids, key_value_segment_ids: int (B, T) and (B, S).
      query_seq_lengths, key_value_seq_lengths: int (B,).
      strategy: as in ``ring_attention``.
      schedule: of the split sequence. If None, ``"zigzag"`` for a causal mask without
        a window, else ``"contiguous"``.
      return_residual: whether to return the log-sum-exp as well.
      options: the other options of ``ring_attention``, such as ``local_window_size``,
        ``sinks``, ``logits_soft_cap`` or ``scale``.

    Returns:
      (B, T, N, V) or (T, N, V), or a tuple of that and (B, T, N) or (T, N).

    Raises:
      TypeError: ``mesh`` is no mesh, or an option says where tokens are; or as
        ``ring_attention``.
      ValueError: there is no mesh, or ``bias`` or ``mask`` do not broadcast; or as
        ``ring_attention``.

    >>> @jax.jit
    ... def attend(x):
    ...     return dot_product_attention(x, x, x, axis_name="context", is_causal=True)
    >>> with jax.set_mesh(jax.make_mesh((8,), ("context",))):
    ...     out = attend(jnp.ones((2, 512, 4, 64)))
    >>> out.shape
    (2, 512, 4, 64)
    """
    natural.check_options(options)
    is_causal = flag(is_causal, "dot_product_attention: is_causal")
    return_residual = flag(return_residual, "dot_product_attention: return_residual")
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    natural.check_shapes(query, key, value)
    ids, key_ids = natural.ids_of(query_segment_ids, key_value_segment_ids, query, key)
    axes = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    mesh = natural.mesh_of(mesh, axes)
    size = 1
    for axis in axes:
        size *= mesh.shape[axis]
    call = _Call(
        mesh=mesh,
        axes=axes,
        size=size,
        is_causal=is_causal,
        strategy=strategy,
        schedule=schedule,
        return_residual=return_residual,
        options=tuple(
            (n, options.pop(n)) for n in sorted(options.keys() - set(_TRAINED))
        ),
        closed=cache.counts()["destroyed"],
    )
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "bias": natural.pairs_of(bias, "bias", query, key),
        "mask": natural.pairs_of(mask, "mask", query, key),
        "query_segment_ids": ids,
        "key_value_segment_ids": key_ids,
        "query_seq_lengths": segments.lengths_of(query_seq_lengths),
        "key_value_seq_lengths": segments.lengths_of(key_value_seq_lengths),
        **options,
    }
    arrays = {n: None if x is None else jnp.asarray(x) for n, x in arrays.items()}
    try:
        hash(call)
    except TypeError:
        # An array where a Python value belongs: ring_attention says which.
        return _attend(arrays, call)
    return _attend_compiled(arrays, call)


@dataclasses.dataclass(frozen=True)
class _Call:
    """What a call is compiled for, besides its arrays' types.

    Attributes:
      mesh: to split over. If None, that of the context.
      axes: of it, along which the sequence is split.
      size: how many devices these are.
      is_causal, strategy, schedule, return_residual: as in ``dot_product_attention``.
      options: for ``ring_attention``, and no arrays.
      closed: how many communicators this process has closed. A program compiled before
        then may name one of them.
    """

    mesh: Any
    axes: tuple[str, ...]
    size: int
    is_causal: bool
    strategy: str | Strategy
    schedule: str | None
    return_residual: bool
    options: tuple[tuple[str, Any], ...]
    closed: int


def _attend(arrays, call: _Call) -> Any:
    """Compute it, and give the result the sharding of the queries.

    Where types say how arrays are split, XLA splits what is not the sequence: the
    kernels reshape arrays in ways that such types do not follow.
    """
    explicit = natural.explicit_axes(call.mesh)
    if not explicit:
        return _attend_over(arrays, call)
    over = functools.partial(_attend_over, call=dataclasses.replace(call, mesh=None))
    out, lse = natural.out_specs(arrays["query"], call.axes, call.size, explicit)
    specs = (out, lse) if call.return_residual else out
    return jax.sharding.auto_axes(over, axes=explicit, out_sharding=specs)(arrays)


def _attend_over(arrays, call: _Call):
    mesh, axes, size = call.mesh, call.axes, call.size
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    trained = {name: arrays.get(name) for name in _TRAINED}
    options = dict(call.options)
    tokens = query.ndim - 3
    schedule = call.schedule
    if schedule is None:
        is_balanced = call.is_causal and options.get("local_window_size") is None
        schedule = "zigzag" if is_balanced else "contiguous"
    layouts = {}
    for name, x in (("query", query), ("key", key)):
        length = x.shape[tokens]
        layouts[name] = (Layout("contiguous", size, length),
                         Layout(schedule, size, length))  # fmt: skip

    def spec(axis: int):
        return jax.P(*[None] * axis, axes)

    def local(arrays, of_queries, whole, lengths, trained):
        query, key, value, key_ids = arrays
        ids, bias, mask = of_queries

        def deal(x, name, axis):
            natural, split = layouts[name]
            return relayout(x, natural, split, axes, axis=axis, positions=TRUSTED)

        rows = query.ndim - 2
        found = ring_attention(
            deal(query, "query", tokens),
            deal(key, "key", tokens),
            deal(value, "key", tokens),
            _rows(deal, bias, whole[0], rows),
            _rows(deal, mask, whole[1], rows),
            axis_name=axes,
            layout=layouts["query"][1],
            positions=TRUSTED,
            key_layout=layouts["key"][1],
            key_positions=TRUSTED,
            is_causal=call.is_causal,
            query_segment_ids=None if ids is None else deal(ids, "query", tokens),
            key_value_segment_ids=(
                None if key_ids is None else deal(key_ids, "key", tokens)
            ),
            query_seq_lengths=lengths[0],
            key_value_seq_lengths=lengths[1],
            strategy=call.strategy,
            return_residual=call.return_residual,
            **trained,
            **options,
        )
        natural, split = layouts["query"]
        return relayout(found, split, natural, axes, axis=tokens, positions=TRUSTED)

    def pad(x, axis: int):
        """Fill up to what the ranks hold."""
        if x is None:
            return None
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, -x.shape[axis] % size)
        return jnp.pad(x, padding) if padding[axis][1] else x

    lengths = arrays["query_seq_lengths"], arrays["key_value_seq_lengths"]
    ids, key_ids = arrays["query_segment_ids"], arrays["key_value_segment_ids"]
    rows = query.ndim - 2
    split, whole = [], []
    for x in (arrays["bias"], arrays["mask"]):
        has_rows = x is not None and x.shape[rows] > 1
        split.append(pad(x, rows) if has_rows else None)
        whole.append(None if has_rows else x)
    arrays = (
        *(pad(x, tokens) for x in (query, key, value)),
        pad(key_ids, tokens),
    )
    of_queries = (pad(ids, tokens), *split)
    specs = (
        spec(tokens),
        (spec(tokens), spec(rows), spec(rows)),
        jax.P(),
        jax.P(),
        jax.P(),
    )
    given = (
        arrays,
        of_queries,
        tuple(whole),
        lengths,
        trained,
    )
    of_each = ((tokens,) * 4, (tokens, rows, rows), None, None, None)
    place = functools.partial(_placed, mesh=mesh, axes=axes)
    given = tuple(
        jax.tree.map(lambda leaf: place(leaf, axis=None), x)
        if axis is None
        else tuple(place(leaf, axis=at) for leaf, at in zip(x, axis, strict=True))
        for x, axis in zip(given, of_each, strict=True)
    )
    found = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=specs,
        out_specs=spec(tokens),
        axis_names=set(axes),
    )(*given)
    length = query.shape[tokens]
    return jax.tree.map(lambda x: _cut(x, length, tokens), found)


# Called outside of jit, each of its operations would be compiled by itself.
_attend_compiled = jax.jit(_attend, static_argnums=1)


def _rows(deal, split, whole, axis: int):
    """Return a bias or mask with its rows dealt, or as it is if it has no rows."""
    return whole if split is None else deal(split, "query", axis)


def _placed(x, *, mesh, axes, axis: int | None):
    """Split a dimension over the axes alone, where types say how arrays are split.

    Types that say more do not follow the reshapes of attention.
    """
    if x is None or mesh is None:
        return x
    if jax.sharding.AxisType.Explicit not in mesh.axis_types:
        return x
    spec = [axes if i == axis else None for i in range(x.ndim)]
    return jax.reshard(x, jax.NamedSharding(mesh, jax.P(*spec)))


def _cut(x, length: int, axis: int):
    if x.shape[axis] == length:
        return x
    sharding = compat.explicit_sharding(x)
    if sharding is not None:
        # What is left cannot be split evenly.
        spec = [None if i == axis else n for i, n in enumerate(sharding.spec)]
        x = jax.reshard(x, sharding.update(spec=jax.P(*spec)))
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)
