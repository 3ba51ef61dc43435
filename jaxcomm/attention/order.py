"""The order of a layout that is data: a rank has its own, and asks others for theirs.

A rank's own is an order of one rank: (1, local length) or (B, 1, local length).
"""

from typing import Any

import jax.numpy as jnp

from jaxcomm.attention.layout import Layout
from jaxcomm.collectives.all_gather import all_gather


def is_of_all(layout: Layout) -> bool:
    """Say whether a layout knows the positions of all ranks."""
    return layout.is_static or layout.order.shape[-2] == layout.size


def of_rank(layout: Layout, positions: Any) -> Layout:
    """Return a layout that knows this rank's positions alone: (..., T), -1 padding."""
    return layout._with_order(jnp.expand_dims(positions, -2))


def of_all(layout: Layout, axis_name: Any) -> Layout:
    """Return a layout that knows all positions; it asks the others, if need be."""
    if is_of_all(layout):
        return layout
    axis = layout.order.ndim - 2
    order = all_gather(layout.order, axis_name, axis=axis, tiled=True)
    return layout._with_order(_with_numbers(layout, order))


def held(layout: Layout, rank: Any) -> Any:
    """Return the positions that this rank holds, which is ``rank``."""
    if is_of_all(layout):
        return layout.positions_of(rank)
    return _with_numbers(layout, layout.order[..., 0, :])


def _with_numbers(layout: Layout, positions):
    """Return positions of which padding has those behind all tokens."""
    return jnp.where(positions < 0, layout.length, positions)
