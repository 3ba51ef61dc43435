"""The documents of a rank's tokens: runs of tokens of one segment id."""

import jax
import jax.numpy as jnp

from jaxcomm.attention.layout import Layout, Tokens
from jaxcomm.attention.mask import PADDING
from jaxcomm.attention.permutation import ids_of


def documents_of(tokens: Tokens, layout: Layout, shape, axis_name, what: str):
    """Return the documents of tokens, padding negative, and which are no padding.

    Returns:
      (ids, is_real): int32 (B, T), or None if all are one document; bool (B, T) or (1,
      T), or None if none is padding.
    """
    at = jnp.asarray(layout.positions_of(jax.lax.axis_index(axis_name)))
    has_padding = layout.length < layout.size * layout.local_length
    is_real = jnp.atleast_2d(at) < layout.length if has_padding else None
    ids = ids_of(tokens.segment_ids, f"{what}: segment_ids")
    if ids is None:
        return None, is_real
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{what}: segment_ids have dtype {ids.dtype}. Pass integers.")
    ids = jnp.broadcast_to(ids.astype(jnp.int32), shape)
    if is_real is not None:
        ids = jnp.where(is_real, ids, PADDING)
    return ids, ids >= 0
