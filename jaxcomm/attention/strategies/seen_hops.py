"""How far keys must travel around a ring, where only the tokens can tell."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxcomm.attention.mask import PADDING, Coordinates, Mask
from jaxcomm.attention.strategies.strategy import AttentionCall, Inputs
from jaxcomm.collectives.all_gather import all_gather
from jaxcomm.collectives.all_reduce import pmax, psum

# Entries of a table of documents, over the rows of a batch.
_TABLE = 4096


def last_seen_hop(call: AttentionCall, inputs: Inputs) -> jax.Array:
    """Return the last hop at which some rank may see a key, the same on all ranks.

    At hop h a rank has the keys of rank ``rank - h``. Costs an all-gather of the
    segment ids, and a maximum.

    Returns:
      int32 scalar, from 0 to ``call.size - 1``.
    """
    rank, size = call.rank(), call.size
    queries = Coordinates(inputs.query_layout.positions_of(rank), inputs.query_ids)
    ids = inputs.key_ids
    if ids is not None:
        ids = all_gather(ids, call.axis_name)
    every = jax.lax.iota(jnp.int32, size)
    keys = Coordinates(jax.vmap(inputs.key_layout.positions_of)(every), ids)
    queries, keys = _in_rows(queries, 2), _in_rows(keys, 3)
    is_seen = _sees(call.mask, *_of_one_batch(queries, keys))
    hops = (rank - every) % size
    return pmax(jnp.where(is_seen, hops, 0).max(), call.axis_name)


def share_documents(call: AttentionCall, inputs: Inputs) -> jax.Array:
    """Return whether two ranks may have tokens of one document, the same on all ranks.

    It costs a sum of 16 KiB. Documents with one entry in the table count as one.

    Returns:
      bool scalar.
    """
    count, entries = _document_table(inputs.query.shape[0])
    held = jnp.zeros(count, jnp.int32)
    for ids in (inputs.query_ids, inputs.key_ids):
        # Padding is of no document: out of bounds, and dropped.
        at = jnp.where(ids < 0, count, entries(ids))
        held = held.at[at.reshape(-1)].set(1, mode="drop")
    return (psum(held, call.axis_name) > 1).any()


def _document_table(batch: int) -> tuple[int, Callable[[jax.Array], jax.Array]]:
    """Return how to tell documents apart by a table, which is small.

    Two documents of a row whose numbers differ by a multiple of some thousand have one
    entry. Padding has one too, which means nothing.

    Args:
      batch: the number of rows. Rows share no document.

    Returns:
      The number of entries; and the function from segment ids, (B or 1, T), to entries,
      int32 of the same shape.
    """
    of_row = max(_TABLE // batch, 256)

    def entries(ids):
        row = jax.lax.broadcasted_iota(jnp.int32, ids.shape, 0)
        return row * of_row + ids % of_row

    return batch * of_row, entries


def _in_rows(tokens: Coordinates, ndim: int) -> Coordinates:
    """Give positions and segment ids the same shape, (..., B or 1, T)."""
    positions, ids = jnp.asarray(tokens.positions), tokens.segment_ids
    if positions.ndim < ndim:
        positions = jnp.expand_dims(positions, -2)
    ids = jnp.zeros_like(positions) if ids is None else ids
    return Coordinates(*jnp.broadcast_arrays(positions, ids))


def _of_one_batch(queries: Coordinates, keys: Coordinates) -> list[Coordinates]:
    """Repeat tokens that are the same for all sequences, where the others differ."""
    rows = [(tokens.positions.shape[-2],) for tokens in (queries, keys)]
    (batch,) = jnp.broadcast_shapes(*rows)

    def repeat(x):
        return jnp.broadcast_to(x, (*x.shape[:-2], batch, x.shape[-1]))

    return [Coordinates(*map(repeat, tokens)) for tokens in (queries, keys)]


def _sees(mask: Mask, queries: Coordinates, keys: Coordinates) -> jax.Array:
    """Say of which ranks a query may see a key.

    Returns:
      bool (size,). Exact but for a window, of which each side is judged by itself.
    """

    def of_row(at, ids, key_at, key_ids):
        ids = jnp.where(at < mask.query_length, ids, PADDING)
        ids, at = jax.lax.sort((ids, at), num_keys=2)
        # The last query of a key's document, then the first.
        last = _places(ids, key_ids, "right") - 1
        seen = (key_ids >= 0) & (key_at < mask.key_length) & (ids[last] == key_ids)
        if mask.right is not None:
            seen &= at[last] >= key_at - mask.right
        if mask.left is not None:
            seen &= at[_places(ids, key_ids, "left")] <= key_at + mask.left
        return seen.any(-1)

    rows = jax.vmap(of_row, in_axes=(0, 0, 1, 1))
    return rows(*queries, *keys).any(0)


def _places(ids, key_ids, side: str):
    """Return where the ids of keys would be among sorted ids."""
    # JAX 0.10.2 cannot type the other methods where shard_map leaves axes to XLA.
    return jnp.searchsorted(ids, key_ids, side=side, method="sort")
