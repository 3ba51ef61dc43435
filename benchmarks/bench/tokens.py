"""The tokens of arrays that are drawn where their layout puts them."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm


def tokens_of(
    layout: jaxcomm.Layout, axis_name, segment_ids: np.ndarray | None = None
) -> jaxcomm.Tokens:
    """Return the tokens of this rank, inside ``jax.shard_map``.

    Their positions are data. XLA would leave out the comparison with what a rule gives.

    Args:
      layout: of the sequence.
      axis_name: the mesh axis that splits it.
      segment_ids: int32 (length,), in natural order.
    """
    _, tokens = layout.reorder(np.empty(layout.length), 0, segment_ids=segment_ids)
    tokens = tokens.agreed()
    rank = jax.lax.axis_index(axis_name)
    return jax.tree.map(lambda x: jnp.asarray(x).reshape(layout.size, -1)[rank], tokens)
