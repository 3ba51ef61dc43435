"""Move a split sequence from one layout to another."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.attention.layout import Layout
from jaxcomm.attention.permutation import checked, poison_unless
from jaxcomm.attention.positions import are_right
from jaxcomm.collectives.ragged_all_to_all import ragged_all_to_all


def relayout(
    x, source: Layout, target: Layout, axis_name, *, positions=None, axis: int = 1,
    lane=None, backend=None,
):  # fmt: skip
    """Give every rank the tokens that another layout says it holds.

    For use inside ``jax.shard_map``: around a layer that wants contiguous tokens, such
    as a state-space layer, a convolution, or a loss on shifted tokens. One ragged
    all-to-all for each array of the tree; its transpose is the way back. Nothing moves
    where ranks hold the same tokens in both, as one rank does. Differentiable as
    ``ring_attention`` is: in reverse mode, and forward mode of that.

    Args:
      x: pytree of arrays whose dimension ``axis`` holds this rank's tokens.
      source: the layout that ``x`` has.
      target: the layout that the result has; of the same length and ranks.
      axis_name: the mesh axis, or tuple of axes, that splits the sequence.
      positions: int32 (B, T) or (T,), of the tokens that ``x`` has, as
        ``Layout.reorder`` returned them. If None, ``source`` must be the natural order.
        Where they are not those of ``source``, this raises or returns NaN, as
        ``ring_attention`` does.
      axis: the dimension that counts tokens.
      lane: which communicator carries the bytes. If None, the default lane.
      backend: what moves the bytes. If None, the backend of the platform.

    Returns:
      A pytree like ``x``. Padding is 0.

    Raises:
      ValueError: the layouts differ in length or ranks, or do not fit ``x`` or axis; or
        a layout differs by sequence of the batch.
      TypeError: positions are missing, or ``source`` or ``target`` is no layout.
      NameError: the axis is not bound.

    >>> def convolve(x, positions, layout):
    ...     plain = Layout("contiguous", layout.size, layout.length)
    ...     y = relayout(x, layout, plain, "context", positions=positions)
    ...     return relayout(jnp.cumsum(y, 1), plain, layout, "context")
    """
    for layout in (source, target):
        if not isinstance(layout, Layout):
            raise TypeError(
                f"relayout: {layout!r} is no layout. Pass jaxcomm.Layout(schedule, "
                "size, length)."
            )
    if (source.size, source.length) != (target.size, target.length):
        raise ValueError(
            f"relayout: from {source.length} tokens on {source.size} ranks to "
            f"{target.length} on {target.size}. Pass layouts of one sequence."
        )
    for layout in (source, target):
        if not layout.is_static and layout.order.ndim == 3:
            raise ValueError(
                "relayout: a layout differs by sequence of the batch, and all rows of "
                "x move alike. Move each row by itself, with its own layout."
            )
    source.check_axis(axis_name, "attention.relayout")
    is_right = are_right(
        positions, source, axis_name, "relayout", lane=lane, backend=backend
    )

    def one(leaf):
        leaf, at = checked(leaf, axis, "relayout")
        if leaf.shape[at] != source.local_length:
            raise ValueError(
                f"relayout: dimension {at} of x has {leaf.shape[at]} tokens on this "
                f"rank, and the layout it comes from {source.local_length}."
            )
        leaf = poison_unless(is_right, jnp.asarray(leaf))
        if _are_alike(source, target):
            return leaf
        rows = jnp.moveaxis(leaf, at, 0)
        axes = tuple(axis_name) if isinstance(axis_name, list) else axis_name
        via = (axes, lane, backend)
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


def _moved(via, rows, source: Layout, target: Layout):
    axis_name, lane, backend = via
    size, length = source.size, source.length
    rank = jax.lax.axis_index(axis_name)
    mine, theirs = _places(source, target, rank), _places(target, source, rank)
    # Padding goes nowhere: behind all tokens, to no rank.
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
    starts = jnp.cumsum(sent) - sent
    output = jnp.zeros((target.local_length, *rows.shape[1:]), rows.dtype)
    arrived = ragged_all_to_all(
        rows[order], output, *(x.astype(jnp.int32) for x in (starts, sent, offsets,
        received)), axis_name=axis_name, lane=lane, backend=backend,
    )  # fmt: skip
    # They arrive by source rank, and from one rank in the order of this rank's places.
    back = jnp.argsort(jnp.argsort(of, stable=True))
    return arrived[back]


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
