"""Move a split sequence from one layout to another."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.attention.layout import Layout, Tokens
from jaxcomm.attention.permutation import checked, poison_both_ways
from jaxcomm.attention.positions import are_right, check_axis, layout_of_ranks
from jaxcomm.collectives.ragged_all_to_all import ragged_all_to_all
from jaxcomm.primitives.call import SCOPE, AxisName, call_of


def relayout(
    x: Any,
    source: Tokens | Layout,
    target: Tokens | Layout,
    axis_name: AxisName,
    *,
    axis: int = 1,
    lane: str | None = None,
    backend: str | None = None,
) -> Any:
    """Give every rank the tokens that another layout says it holds.

    For use inside ``jax.shard_map``: around a layer that wants contiguous tokens, such
    as a state-space layer, a convolution, or a loss on shifted tokens. One ragged
    all-to-all for each array of the tree; its transpose is the way back. Nothing moves
    where ranks hold the same tokens in both, as one rank does. Differentiable as
    ``ring_attention`` is: in reverse mode, and forward mode of that.

    Args:
      x: pytree of arrays whose dimension ``axis`` holds this rank's tokens.
      source: the tokens that ``x`` has, as ``Layout.reorder`` returned them. Or the
        layout of tokens that are in their natural order. Where the positions are not
        those of the layout, this raises or returns NaN, as ``ring_attention`` does.
      target: the layout that the result has, or tokens of it; of the same length and
        ranks.
      axis_name: the mesh axis, or tuple of axes, that splits the sequence.
      axis: the dimension that counts tokens.
      lane: which communicator carries the bytes. If None, the default lane.
      backend: what moves the bytes. If None, the backend of the platform.

    Returns:
      A pytree like ``x``. Padding is 0.

    Raises:
      ValueError: the layouts differ in length or ranks, or do not fit ``x`` or axis; or
        a layout differs by sequence of the batch.
      TypeError: positions are missing, or ``source`` or ``target`` is of another type.
      NameError: the axis is not bound.

    >>> def convolve(x, tokens):
    ...     plain = Layout("contiguous", tokens.layout.size, tokens.layout.length)
    ...     y = relayout(x, tokens, plain, "context")
    ...     return relayout(jnp.cumsum(y, 1), plain, tokens, "context")
    """
    what = "relayout"
    held = source if isinstance(source, Tokens) else Tokens(source, None)
    wanted = target if isinstance(target, Tokens) else Tokens(target, None)
    for tokens in (held, wanted):
        if not isinstance(tokens.layout, Layout):
            raise TypeError(
                f"{what}: {tokens.layout!r} is no layout. Pass tokens that layout."
                "reorder returned, or jaxcomm.Layout(schedule, size, length)."
            )
    layouts: tuple[Layout, Layout] = held.layout, wanted.layout
    source, target = layouts
    if (source.size, source.length) != (target.size, target.length):
        raise ValueError(
            f"{what}: from {source.length} tokens on {source.size} ranks to "
            f"{target.length} on {target.size}. Pass layouts of one sequence."
        )
    if source.differs_by_row or target.differs_by_row:
        raise ValueError(
            f"{what}: a layout differs by sequence of the batch, and all rows of x "
            "move alike. Move each row by itself, with its own layout."
        )
    check_axis(source, axis_name, "attention.relayout")
    named = call_of(what, axis_name, lane=lane, backend=backend)
    # Collectives of the backward pass travel by the same.
    with SCOPE(named.scope):
        source = layout_of_ranks(held, named.axes, what, "source")
        target = layout_of_ranks(wanted, named.axes, what, "target")
        is_right = are_right(held, source, named.axes, what, "source")

        def one(leaf):
            leaf, at = checked(leaf, axis, what)
            if leaf.shape[at] != source.local_length:
                raise ValueError(
                    f"{what}: dimension {at} of x has {leaf.shape[at]} tokens on this "
                    f"rank, and the layout it comes from {source.local_length}."
                )
            leaf = poison_both_ways(is_right, jnp.asarray(leaf))
            if _are_alike(source, target):
                return _without_padding(leaf, at, source, named.axes)
            rows = jnp.moveaxis(leaf, at, 0)
            via = named.axes, named.scope
            return jnp.moveaxis(_move_compiled(via, rows, source, target), 0, at)

        return jax.tree.map(one, x)


def _are_alike(source: Layout, target: Layout) -> bool:
    """Say whether every rank holds the same tokens at the same places.

    On one rank all schedules do.
    """
    if source == target:
        return True
    if not (source.is_static and target.is_static):
        return False
    return np.array_equal(source.all_positions(), target.all_positions())


def _without_padding(leaf, axis: int, layout: Layout, axis_name):
    """Return the tokens of this rank, with zeros for padding."""
    if layout.size * layout.local_length == layout.length:
        return leaf
    held = jnp.asarray(layout.positions_of(jax.lax.axis_index(axis_name)))
    held = jnp.expand_dims(held, range(1, leaf.ndim - axis))
    return jnp.where(held < layout.length, leaf, jnp.zeros((), leaf.dtype))


def _moved(via, rows, source: Layout, target: Layout):
    axis_name, scope = via
    rank = jax.lax.axis_index(axis_name)
    if source.is_static and target.is_static:
        route = jax.tree.map(lambda x: jnp.asarray(x)[rank], _known(source, target))
    else:
        route = _traced(source, target, rank)
    output = jnp.zeros((target.local_length, *rows.shape[1:]), rows.dtype)
    with SCOPE(scope):
        arrived = ragged_all_to_all(
            _ordered(rows, route.order), output, route.starts, route.sent,
            route.offsets, route.received, axis_name=axis_name,
        )  # fmt: skip
    return _ordered(arrived, route.back)


class _Route(NamedTuple):
    """How the tokens of a rank travel: int32, of each rank or of one.

    Attributes:
      order: the rank's tokens, or runs of them, in the order in which they are sent.
      starts, sent, offsets, received: as ``ragged_all_to_all`` takes them.
      back: where, among those that arrive, the rank's tokens or runs of them are.
    """

    order: Any
    starts: Any
    sent: Any
    offsets: Any
    received: Any
    back: Any


def _ordered(rows, runs):
    """Return rows in the order of the runs they consist of."""
    if len(runs) == 1 or not rows.size:
        return rows
    return rows.reshape(len(runs), -1, *rows.shape[1:])[runs].reshape(rows.shape)


@functools.lru_cache(maxsize=64)
def _known(source: Layout, target: Layout) -> _Route:
    """Return the route of all ranks, by rank, where no position is data."""
    size, length = source.size, source.length
    old, new = (x.all_positions().reshape(size, -1) for x in (source, target))
    ranks = np.arange(size)[:, None]
    # Padding goes nowhere: behind all tokens, to no rank.
    behind = size * target.local_length
    places = np.append(target.places()[:length], behind)[np.minimum(old, length)]
    of = source.places()[np.minimum(new, length - 1)] // source.local_length
    of = np.where(new < length, of, size)
    to = np.minimum(places // target.local_length, size)
    pairs = np.bincount(
        (ranks * (size + 1) + to).reshape(-1), minlength=size * (size + 1)
    )
    sent = pairs.reshape(size, size + 1)[:, :size]
    # They arrive by source rank, and from one rank in the order of this rank's places.
    back = np.argsort(np.argsort(of, axis=1, kind="stable"), axis=1)
    route = _Route(
        _runs(np.argsort(places, axis=1, kind="stable")),
        np.cumsum(sent, axis=1) - sent,
        sent,
        np.cumsum(sent, axis=0) - sent,
        sent.T,
        _runs(back),
    )
    return jax.tree.map(lambda x: x.astype(np.int32), route)


def _runs(order):
    """Return each row as the longest equal runs of successive numbers it consists of.

    So that a program holds a few numbers, and not one for each token.
    """
    count = order.shape[1]
    breaks = np.flatnonzero((np.diff(order, axis=1) != 1).any(0)) + 1
    length = math.gcd(count, *breaks.tolist())
    starts = order[:, ::length]
    # A run must begin at a multiple of its length.
    length = math.gcd(length, *np.unique(starts).tolist())
    return order[:, ::length] // length


def _traced(source: Layout, target: Layout, rank) -> _Route:
    """Return the route of one rank, where positions are data."""
    size, length = source.size, source.length
    mine, theirs = _places(source, target, rank), _places(target, source, rank)
    at = jnp.asarray(source.positions_of(rank))
    to = jnp.where(at < length, mine // target.local_length, size)
    order = jnp.argsort(jnp.where(at < length, mine, size * target.local_length))
    sent = jnp.bincount(to, length=size + 1)[:size]
    wanted = jnp.asarray(target.positions_of(rank))
    of = jnp.where(wanted < length, theirs // source.local_length, size)
    received = jnp.bincount(of, length=size + 1)[:size]
    # Where this rank's tokens start among those that each rank receives: all ranks know
    # both layouts.
    everyone = jnp.arange(size, dtype=jnp.int32)
    offsets = jax.vmap(lambda other: _received_before(source, target, other, rank))(
        everyone
    )
    back = jnp.argsort(jnp.argsort(of, stable=True))
    route = _Route(order, jnp.cumsum(sent) - sent, sent, offsets, received, back)
    return jax.tree.map(lambda x: x.astype(jnp.int32), route)


def _places(source: Layout, target: Layout, rank):
    """Return where the tokens of a rank are in the other layout, in its rank order."""
    places = jnp.asarray(target.places())
    at = jnp.asarray(source.positions_of(rank))
    return places[jnp.minimum(at, places.shape[0] - 1)]


def _received_before(source: Layout, target: Layout, rank, sender):
    """Return how many tokens a rank receives from the ranks before the sender."""
    of = _places(target, source, rank) // source.local_length
    is_real = jnp.asarray(target.positions_of(rank)) < source.length
    return jnp.sum(is_real & (of < sender))


_move = jax.custom_vjp(_moved, nondiff_argnums=(0,))


# Not _move: forward mode cannot enter a custom_vjp, and derives these two instead.
def _forward(via, rows, source, target):
    return _moved(via, rows, source, target), (source, target)


def _backward(via, layouts, grad):
    source, target = layouts
    return _moved(via, grad, target, source), None, None


_move.defvjp(_forward, _backward)
# Called outside of jit, each of its operations would be compiled by itself.
_move_compiled = jax.jit(_move, static_argnums=0)
