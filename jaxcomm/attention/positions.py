"""The tokens that a rank is given with its arrays, and what its layout says of them."""

import functools

import jax
import jax.numpy as jnp

from jaxcomm import compat, config
from jaxcomm.attention.layout import (
    Layout,
    Tokens,
    of_all_ranks,
    of_this_rank,
    positions_here,
)
from jaxcomm.attention.mask import PADDING
from jaxcomm.attention.permutation import ids_of, no_positions
from jaxcomm.attention.strategies.strategy import keep
from jaxcomm.attention.table import width
from jaxcomm.collectives.all_gather import all_gather
from jaxcomm.communicator import replica_groups
from jaxcomm.primitives.call import call_of
from jaxcomm.primitives.collective import Collective, define
from jaxcomm.primitives.request import Request

# In place of positions: of tokens that jaxcomm itself put into the layout.
TRUSTED = object()


def check_axis(layout: Layout, axis_name, what: str) -> None:
    """Raise NameError or ValueError if an axis is not that of a layout."""
    axes = replica_groups.canonical_axes(axis_name)
    if not axes or len(set(axes)) < len(axes):
        raise ValueError(
            f"{what}: axis_name={axis_name!r} names "
            f"{'an axis twice' if axes else 'no axis'}. Pass each axis that splits "
            "the sequence once."
        )
    compat.check_axes_bound(axes, what)
    size = jax.lax.axis_size(axes)
    if size != layout.size:
        raise ValueError(
            f"{what}: the layout is of {layout.size} ranks, and axis {axis_name!r} "
            f"has {size}. Reorder the sequence with a layout of size={size}."
        )


def layout_of_ranks(
    tokens: Tokens, axis_name, what: str, argument: str, of_all: bool = True
) -> Layout:
    """Return the layout of tokens; order that is data is gathered from the ranks.

    Args:
      of_all: if False, the order is that of this rank: see ``layout.of_this_rank``.
    """
    layout = tokens.layout
    if not isinstance(layout.order, jax.ShapeDtypeStruct):
        return layout
    if tokens.positions is None:
        raise TypeError(f"{what}: {no_positions(layout.schedule, argument)}")
    held = jnp.asarray(tokens.positions)
    if held.ndim == 2 and not layout.differs_by_row:
        # All rows have the same: see are_right.
        held = held[0] if len(held) else jnp.zeros(held.shape[1:], held.dtype)
    found = of_this_rank(layout, held)
    return of_all_ranks(found, axis_name) if of_all else found


def held_tokens(given, x, axis_name, what: str, name: str, argument: str, of_all=True):
    """Return the tokens of an array, and who holds which positions.

    Args:
      of_all: if False, order that is data may be that of this rank.
    """
    if isinstance(given, Layout):
        if not given.is_natural:
            raise TypeError(f"{what}: {no_positions(given.schedule, argument)}")
        given = Tokens(given, None)
    if not isinstance(given, Tokens):
        raise TypeError(
            f"{what}: {argument}={given!r} is of type {type(given).__name__}. Pass the "
            "tokens of `batch, tokens = layout.reorder(batch)`, or a contiguous Layout."
        )
    layout = given.layout
    batch, count = x.shape[:2]
    if count != layout.local_length:
        raise ValueError(
            f"{what}: {name} has {count} tokens on this rank, and the layout of "
            f"{argument} gives each of its {layout.size} ranks {layout.local_length} "
            f"of {layout.length}. Reorder {name} with that layout; or check that "
            "dimension 1 counts tokens and is split over the axis alone."
        )
    check_axis(layout, axis_name, what)
    for part in ("positions", "segment_ids"):
        shape = getattr(getattr(given, part), "shape", None)
        if shape not in (None, (batch, count), (1, count), (count,)):
            raise ValueError(
                f"{what}: {argument}.{part} has shape {shape} on this rank, and "
                f"{name} has {batch} sequences of {count} tokens. Split what "
                "layout.reorder returned as the batch is."
            )
    return given, layout_of_ranks(given, axis_name, what, argument, of_all)


def _ids_of(tokens: Tokens, shape, what: str):
    """Return the documents of tokens as int32 of a shape, or None."""
    ids = ids_of(tokens.segment_ids, f"{what}: segment_ids")
    if ids is None:
        return None
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{what}: segment_ids have dtype {ids.dtype}. Pass integers.")
    return jnp.broadcast_to(ids.astype(jnp.int32), shape)


def ids_of_both(queries: Tokens, keys: Tokens, shapes, what: str):
    """Return int32 (B, T) and (B, S), the documents of queries and keys, or None."""
    pairs = zip((queries, keys), shapes, strict=True)
    found = [_ids_of(tokens, shape, what) for tokens, shape in pairs]
    if (found[0] is None) != (found[1] is None):
        raise ValueError(
            f"{what}: {'key_tokens' if found[0] is None else 'tokens'} alone has "
            "segment ids or lengths. Give layout.reorder those of queries and of keys; "
            "zeros where all is one document."
        )
    return found


def documents_of(tokens: Tokens, layout: Layout, shape, axis_name, what: str):
    """Return the documents of tokens, padding negative, and which are no padding.

    Returns:
      (ids, is_real): int32 (B, T), or None if all are one document; bool (B, T) or (1,
      T), or None if none is padding.
    """
    at = jnp.asarray(layout.positions_of(jax.lax.axis_index(axis_name)))
    has_padding = layout.length < layout.size * layout.local_length
    is_real = jnp.atleast_2d(at) < layout.length if has_padding else None
    ids = _ids_of(tokens, shape, what)
    if ids is None:
        return None, is_real
    if is_real is not None:
        ids = jnp.where(is_real, ids, PADDING)
    return ids, ids >= 0


def table_of_rank(tokens: Tokens, batch: int, what: str):
    """Return the table of this rank's tokens, int32 (B, numbers), or None."""
    table = tokens.table
    if table is None:
        return None
    count = width(tokens.layout.size, tokens.layout.local_length)
    if table.shape not in ((batch, count), (1, count), (count,)):
        raise ValueError(
            f"{what}: tokens.table has shape {table.shape} on this rank, and "
            f"{(batch, count)} is expected. Split what layout.reorder returned as the "
            "batch is."
        )
    return jnp.broadcast_to(jnp.asarray(table, jnp.int32), (batch, count))


def with_padding(ids, layout: Layout, rank):
    """Return the ids of a rank's tokens, negative where the layout has padding."""
    if ids is None or layout.length == layout.size * layout.local_length:
        return ids
    return jnp.where(positions_here(layout, rank) < layout.length, ids, PADDING)


def are_right(tokens: Tokens, layout: Layout, axis_name, what: str, argument="tokens"):
    """Say whether this rank holds the tokens that the layout says.

    The ``host`` backend raises on all ranks where one of them does not. No other can: a
    GPU's host does not see what is on the device. With ``JAXCOMM_CHECK=1`` a callback
    raises there too.

    Args:
      tokens: of this rank. Their positions may be None, if the layout is the natural
        order, or TRUSTED.

    Returns:
      bool scalar, or None where there is nothing to compare.
    """
    positions = tokens.positions
    if positions is None and not layout.is_natural:
        raise TypeError(f"{what}: {no_positions(layout.schedule, argument)}")
    if positions is None or positions is TRUSTED:
        return None
    positions = jnp.asarray(positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(
            f"{what}: {argument}.positions has dtype {positions.dtype}. Pass the "
            "tokens that layout.reorder returned."
        )
    expected = positions_here(layout, jax.lax.axis_index(axis_name))
    expected = jnp.asarray(expected)
    expected = jnp.where(expected < layout.length, expected, PADDING)
    shape = positions.shape
    fits = len(shape) in (1, 2) and shape[-1:] == expected.shape[-1:]
    if not fits or (expected.ndim == 2 and shape != expected.shape):
        raise ValueError(
            f"{what}: {argument}.positions has shape {shape} on this rank, and "
            f"{expected.shape} is expected, or a row of it for each sequence. Split "
            "what layout.reorder returned as the batch is."
        )
    is_taken = isinstance(tokens.layout.order, jax.ShapeDtypeStruct)
    if is_taken and (layout.differs_by_row or positions.size == shape[-1]):
        # The order of the layout is these positions: see layout_of_ranks.
        return None
    found = positions.astype(jnp.int32).reshape(-1)
    expected = jnp.broadcast_to(expected, shape).reshape(-1)
    mistake = _first_mistake(found, expected, shape[-1])
    mistake = Request(CHECK_POSITIONS, mistake, call_of(what, axis_name)).run()
    is_right = mistake[0] < 0
    if config.check():
        _raise_everywhere(what, mistake, axis_name)
    return is_right


def all_are_right(queries, keys, axis_name, what: str):
    """Say whether this rank holds the queries and the keys that their layouts say.

    Args:
      queries, keys: tokens and layout of each. None for the keys if they are the same
        tokens as the queries.

    Returns:
      bool scalar, or None where there is nothing to compare. A policy of
      ``jax.checkpoint`` can save it.
    """
    tokens, layout = queries
    found = [are_right(tokens, layout, axis_name, what)]
    if keys is not None:
        tokens, layout = keys
        found.append(are_right(tokens, layout, axis_name, what, "key_tokens"))
    found = [is_right for is_right in found if is_right is not None]
    return keep(functools.reduce(jnp.logical_and, found)) if found else None


def _first_mistake(found, expected, tokens: int):
    """Return int32 (3,): the first wrong token or -1, its position, the right one."""
    if not found.size:
        return jnp.array([-1, 0, 0], jnp.int32)
    is_wrong = found != expected
    at = jnp.argmax(is_wrong).astype(jnp.int32)
    token = jnp.where(is_wrong[at], at % tokens, -1)
    return jnp.stack([token, found[at], expected[at]])


def _raise_everywhere(what: str, mistake, axis_name) -> None:
    """Raise by a callback on all ranks: those that went on would wait for the rest."""
    mistakes = all_gather(mistake, axis_name)
    rank = jnp.argmax(mistakes[:, 0] >= 0)

    def complain(rank, token, found, expected):
        if token < 0:  # jax.vmap runs both branches of the cond below
            return
        raise ValueError(
            f"{what}: rank {rank} does not hold the tokens that its layout says: token "
            f"{token} has position {found}, and the layout says {expected} (-1 is "
            "padding). Pass the tokens that came with this batch: `batch, tokens = "
            "layout.reorder(batch)`."
        )

    def call(rank, mistake):
        jax.debug.callback(complain, rank, *mistake)

    is_wrong = mistakes[rank, 0] >= 0
    jax.lax.cond(is_wrong, call, lambda *_: None, rank, mistakes[rank])


class CheckPositions(Collective):
    """Operand and result: int32 (3,), see :func:`_first_mistake`. Nothing moves."""

    name = "check_positions"

    def aliases(self, num_operands):
        return {i: i for i in range(num_operands)}

    def emulate(self, x, i):
        return x

    def xla(self, xs, call):
        return list(xs)


CHECK_POSITIONS = CheckPositions()
define(CHECK_POSITIONS)
