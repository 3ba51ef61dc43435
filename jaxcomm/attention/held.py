"""The tokens that a rank is given with its arrays, checked against their shapes."""

import jax.numpy as jnp

from jaxcomm.attention import order, permutation
from jaxcomm.attention.layout import Layout, Tokens
from jaxcomm.attention.mask import PADDING
from jaxcomm.attention.permutation import no_positions
from jaxcomm.attention.positions import check_axis, layout_of_ranks
from jaxcomm.attention.table import width


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


def ids_of_both(queries: Tokens, keys: Tokens, shapes, what: str):
    """Return int32 (B, T) and (B, S), the documents of queries and keys, or None."""
    found = []
    for tokens, shape in zip((queries, keys), shapes, strict=True):
        ids = permutation.ids_of(tokens.segment_ids, f"{what}: segment_ids")
        if ids is not None and not jnp.issubdtype(jnp.asarray(ids).dtype, jnp.integer):
            raise TypeError(
                f"{what}: segment_ids have dtype {ids.dtype}. Pass integers."
            )
        if ids is not None:
            ids = jnp.broadcast_to(jnp.asarray(ids, jnp.int32), shape)
        found.append(ids)
    if (found[0] is None) != (found[1] is None):
        raise ValueError(
            f"{what}: {'key_tokens' if found[0] is None else 'tokens'} alone has "
            "segment ids or lengths. Give layout.reorder those of queries and of keys; "
            "zeros where all is one document."
        )
    return found


def table_of_rank(tokens: Tokens, batch: int, what: str):
    """Return the table of this rank's tokens, int32 (B, numbers), or None."""
    table = tokens.table
    if table is None:
        return None
    count = width(tokens.layout.size)
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
    return jnp.where(order.held(layout, rank) < layout.length, ids, PADDING)
