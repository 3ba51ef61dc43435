"""The keys of another rank: by parts of the queries, those that may see one alone.

Of two ranks' documents few are the same: often the one that a border cuts, or none. A
loop goes through the parts of the queries from the first to the last that may see a
key. It changes these parts of the results where they are; a branch would write all.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.kernel import Grads, Hop, Saved, merge
from jaxcomm.attention.mask import Coordinates, Run, document_table

# A part costs two waits of the host, 80 us on an H100, and its tokens their time.
_PARTS = 8


def forward(hop: Hop, merged: Any, attend: Callable) -> tuple[Any, Any]:
    """Attend to the keys of another rank.

    Args:
      hop: one that is a run apart.
      merged: (out, lse) over other keys, to merge with; or None.
      attend: takes the hop of a part, and returns its (out, lse).
    """
    rows, start, count = _parts(hop)
    sums = hop.sum_dtype
    if merged is None:
        shape = (*hop.query.shape[:3], hop.value.shape[3])
        merged = jnp.zeros(shape, sums), jnp.full(shape[:3], -jnp.inf, sums)
    # What a loop carries is in memory: no more digits than are needed.
    out, lse = merged
    if hop.follows_one and hop.is_last:
        out = out.astype(hop.query.dtype)

    def step(turn, carry):
        at = start + turn * rows
        mine = [_rows(x, at, rows) for x in carry]
        found, of_found = attend(_part(hop, at, rows))
        new = merge(mine[0].astype(sums), mine[1], found.astype(sums), of_found)
        return tuple(
            _with_rows(x, part, at) for x, part in zip(carry, new, strict=True)
        )

    out, lse = jax.lax.fori_loop(0, count, step, (out, lse))
    return out.astype(sums), lse


def backward(hop: Hop, saved: Saved, total: Any, differentiate: Callable) -> Grads:
    """Return the gradients of attention to the keys of another rank.

    Args:
      hop: as in :func:`forward`.
      saved: what is known over all keys.
      total: gradient of the queries by other keys, to add to; or None.
      differentiate: takes the hop of a part and what is saved of it, and returns its
        gradients.
    """
    rows, start, count = _parts(hop)
    sums = hop.sum_dtype
    if not hop.has_residual:
        # What a loop is given is computed, used or not.
        saved = saved._replace(delta=None)
    if total is None:
        # A row is in one part: nothing is added to what is rounded.
        total = jnp.zeros_like(hop.query)
    elif hop.follows_one and hop.is_last:
        total = total.astype(hop.query.dtype)

    def step(turn, carry):
        query, *keys = carry
        at = start + turn * rows
        part = Saved(*(None if x is None else _rows(x, at, rows) for x in saved))
        found = differentiate(_part(hop, at, rows), part)
        mine = _rows(query, at, rows).astype(sums) + found.query
        added = (x + y for x, y in zip(keys, found[1:3], strict=True))
        return (_with_rows(query, mine, at), *added)

    zeros = (jnp.zeros(x.shape, sums) for x in (hop.key, hop.value))
    query, key, value = jax.lax.fori_loop(0, count, step, (total, *zeros))
    return Grads(query.astype(sums), key, value)


def _parts(hop: Hop):
    """Return the parts of the queries that may see a key.

    Returns:
      (rows, start, count): the queries of a part, int; the first of the first part and
      how many parts follow, int32.
    """
    tokens = hop.query.shape[1]
    rows = tokens if tokens % _PARTS else tokens // _PARTS
    may_see = _may_see(hop)
    number = jax.lax.iota(jnp.int32, tokens)
    first = jnp.where(may_see, number, tokens).min()
    end = jnp.where(may_see, number + 1, 0).max()
    count = jnp.maximum(-(-(end - first) // rows), 0)
    return rows, jnp.minimum(first, tokens - count * rows), count


def _may_see(hop: Hop):
    """Return which queries may see a key, bool (B, T): all that do, and some others."""
    queries, keys, mask = hop.queries, hop.keys, hop.mask
    count, entries = document_table(hop.query.shape[0])
    unseen = jnp.iinfo(jnp.int32).max
    # The first position of each document's keys. Padding is out of bounds, and dropped.
    at = jnp.where(keys.segment_ids < 0, count, entries(keys.segment_ids))
    positions = jnp.broadcast_to(keys.positions, at.shape)
    if mask.right is None:
        positions = jnp.zeros_like(positions)
    firsts = jnp.full(count, unseen, jnp.int32)
    firsts = firsts.at[at.reshape(-1)].min(positions.reshape(-1), mode="drop")
    first = firsts[entries(queries.segment_ids)]
    last = jnp.int32(0) if mask.right is None else queries.positions + mask.right
    return (queries.segment_ids >= 0) & (first <= last)


def _part(hop: Hop, at, rows: int) -> Hop:
    """Return the hop of some of the queries."""
    queries = Coordinates(
        jax.lax.dynamic_slice_in_dim(hop.queries.positions, at, rows, axis=-1),
        _rows(hop.queries.segment_ids, at, rows),
    )
    return hop.replace(
        query=_rows(hop.query, at, rows),
        queries=queries,
        query_segments=(rows,),
        blocks=(),
        block=None,
        runs=(Run((0, rows), hop.runs[0].keys, "apart", False),),
    )


def _rows(x, at, rows: int):
    return jax.lax.dynamic_slice_in_dim(x, at, rows, axis=1)


def _with_rows(x, part, at):
    return jax.lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), at, axis=1)
