"""Attention of the local queries against one block of keys and values, by XLA.

Both functions take the public layout and global positions, and know nothing of the
ring; ``fused_hop.py`` has them for cuDNN. Inside, tiles are heads-major, so that a
tile's scores stay in the L2 cache, and the query heads that share a key head are rows
of one matrix.

Source: Dao, FlashAttention-2, 2023.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.tiles import Tiles
from jaxcomm.attention.mask import Visibility
from jaxcomm.attention.merge import at_least_half
from jaxcomm.attention.schedules.block import Blocks

# A tile's scores are 512 x 512 float32, 1 MiB: half to all of the L2 cache of current
# cores. Measured flat within 3 % from 256 x 1024 to 1024 x 512; small wins at the mask.
_ROWS = 512
_KEYS = 512
# With many query heads per key head a tile keeps at least so many queries.
_FEWEST_QUERIES = 64


@dataclasses.dataclass(frozen=True)
class HopConfig:
    """What is the same for every hop of a ring.

    Attributes:
      scale: factor on the scores.
      visibility: which keys a query sees.
      query_segments: parts of the local queries that a tile should not straddle.
      key_segments: the same for the keys.
      implementation: ``"cudnn"`` if a program without it shall be refused.
      blocks: what a fused kernel computes of a hop. If None, there is none.
      has_residual: whether the log-sum-exp may have a gradient.
    """

    scale: float
    visibility: Visibility
    query_segments: tuple[int, ...]
    key_segments: tuple[int, ...]
    implementation: str | None = None
    blocks: Blocks | None = None
    has_residual: bool = False


def sum_dtype(dtype):
    """Return the dtype of sums: float64 for float64 inputs, else float32.

    Not ``jnp.promote_types``, which strict promotion forbids.
    """
    return jnp.dtype("float64" if jnp.finfo(dtype).bits == 64 else "float32")


class _Layout:
    """Translates between the public layout and tiles for one hop's shapes."""

    def __init__(self, query, key, config: HopConfig):
        self.batch, self.length, self.query_heads, _ = query.shape
        self.heads = key.shape[2]
        self.group = self.query_heads // self.heads
        self.dtype = sum_dtype(query.dtype)
        queries = max(_FEWEST_QUERIES, _ROWS // self.group)
        self.queries = Tiles.fit(config.query_segments, queries)
        self.keys = Tiles.fit(config.key_segments, _KEYS)

    def split_queries(self, x, fill: float = 0):
        """(B, T, N[, D]) to (B K, tiles, rows[, D]); rows count group, then token."""
        heads = (self.heads, self.group)
        x = x.reshape(self.batch, self.length, *heads, *x.shape[3:])
        x = self.queries.split(jnp.moveaxis(x, 1, 3), 3, fill)
        x = jnp.moveaxis(x, 3, 2).astype(self.dtype)
        rows = self.group * self.queries.size
        all_heads = self.batch * self.heads
        return x.reshape(all_heads, self.queries.count, rows, *x.shape[5:])

    def join_queries(self, x):
        """Undo :meth:`split_queries`."""
        shape = (self.batch, self.heads, self.queries.count, self.group)
        x = x.reshape(*shape, self.queries.size, *x.shape[3:])
        x = self.queries.join(jnp.moveaxis(x, 2, 3), 3)
        x = jnp.moveaxis(x, 3, 1)
        return x.reshape(self.batch, self.length, self.query_heads, *x.shape[4:])

    def split_keys(self, x):
        """(B, S, K, D) to (B K, tiles, keys, D), in the dtype of ``x``."""
        x = self.keys.split(jnp.moveaxis(x, 1, 2), 2)
        return x.reshape(self.batch * self.heads, *x.shape[2:])

    def join_keys(self, x):
        """Undo :meth:`split_keys`."""
        x = x.reshape(self.batch, self.heads, *x.shape[1:])
        return jnp.moveaxis(self.keys.join(x, 2), 2, 1)

    def split_positions(self, query_positions, key_positions):
        """Return (tiles, rows), (tiles, keys) of int32; padding keys are beyond all."""
        beyond = jnp.iinfo(jnp.int32).max
        # Padding queries repeat a real position: they must not change a tile's kind.
        queries = self.queries.split(query_positions, 0, "edge")
        return queries, self.keys.split(key_positions, 0, beyond)


def hop_forward(
    query, key, value, query_positions, key_positions, *, config: HopConfig
):
    """Compute attention over one block of keys.

    Args:
      query: (B, T, N, D) floating.
      key, value: (B, S, K, D) floating; K divides N.
      query_positions: int32 (T,), global.
      key_positions: int32 (S,), global.
      config: scale, visibility and segments.

    Returns:
      (out, lse): (B, T, N, D) and (B, T, N), float32 (float64 for float64 inputs). Rows
      that see no key give 0 and -inf.
    """
    layout = _Layout(query, key, config)
    queries = layout.split_queries(query) * config.scale
    keys, values = layout.split_keys(key), layout.split_keys(value)
    positions = layout.split_positions(query_positions, key_positions)
    kinds = config.visibility.kinds(*positions)

    def of_head(of):
        query_tiles, key_tiles, value_tiles = of

        def of_queries(of):
            rows, row_positions, kinds_of_row = of

            def of_keys(carry, of):
                columns, values, column_positions, kind = of

                def whole(carry):
                    return _forward_tile(carry, rows, columns, values, None)

                def masked(carry):
                    allowed = config.visibility.allowed(
                        jnp.tile(row_positions, layout.group)[:, None], column_positions
                    )
                    return _forward_tile(carry, rows, columns, values, allowed)

                branches = (lambda carry: carry, whole, masked)
                return jax.lax.switch(kind, branches, carry), None

            top = jnp.full_like(rows[:, 0], -jnp.inf)
            start = (top, jnp.zeros_like(top), jnp.zeros_like(rows))
            of_all = (key_tiles, value_tiles, positions[1], kinds_of_row)
            (top, total, out), _ = jax.lax.scan(of_keys, start, of_all)
            # A row that saw no key has out 0 and top -inf.
            total = at_least_half(total)
            share = 1 / total
            return out * share[:, None], top + jnp.log(total)

        return jax.lax.map(of_queries, (query_tiles, positions[0], kinds))

    out, lse = jax.lax.map(of_head, (queries, keys, values))
    return layout.join_queries(out), layout.join_queries(lse)


def _forward_tile(carry, rows, columns, values, allowed):
    """Add one tile to (running maximum, running sum, unnormalized output)."""
    top, total, out = carry
    scores = rows @ columns.astype(rows.dtype).T
    if allowed is not None:
        scores = jnp.where(allowed, scores, -jnp.inf)
    new_top = jnp.maximum(top, scores.max(1))
    finite_top = jnp.where(jnp.isneginf(new_top), 0, new_top)
    weights = jnp.exp(scores - finite_top[:, None])
    decay = jnp.exp(top - finite_top)
    total = total * decay + weights.sum(1)
    out = out * decay[:, None] + weights @ values.astype(rows.dtype)
    return new_top, total, out


def hop_backward(
    query,
    key,
    value,
    query_positions,
    key_positions,
    grad_out,
    lse,
    delta,
    *,
    config: HopConfig,
):
    """Compute what one block of keys adds to the gradients.

    Args:
      query, key, value, query_positions, key_positions, config: as in
        :func:`hop_forward`.
      grad_out: (B, T, N, D), gradient of the output over all keys.
      lse: (B, T, N) float32, over all keys; -inf for rows that see none.
      delta: (B, T, N) float32, sum of ``grad_out * out`` over D, less the gradient of
        ``lse``.

    Returns:
      (grad_query, grad_key, grad_value): like query, key and value, but float32
      (float64 for float64 inputs).
    """
    layout = _Layout(query, key, config)
    queries = layout.split_queries(query) * config.scale
    keys, values = layout.split_keys(key), layout.split_keys(value)
    positions = layout.split_positions(query_positions, key_positions)
    kinds = config.visibility.kinds(*positions)
    # exp(score - inf) is 0: rows that see no key, and padding, give no gradient.
    lse = layout.split_queries(jnp.where(jnp.isneginf(lse), jnp.inf, lse), jnp.inf)
    grads = layout.split_queries(grad_out)
    delta = layout.split_queries(delta)

    def of_head(of):
        query_tiles, grad_tiles, lse_tiles, delta_tiles, key_tiles, value_tiles = of

        def of_keys(grad_queries, of):
            columns, values, column_positions, kinds_of_column = of
            columns, values = columns.astype(layout.dtype), values.astype(layout.dtype)

            def of_queries(carry, of):
                rows, grads, lse, delta, row_positions, kind = of
                tile = (rows, grads, lse, delta, columns, values)

                def whole():
                    return _backward_tile(*tile, None)

                def masked():
                    allowed = config.visibility.allowed(
                        jnp.tile(row_positions, layout.group), column_positions[:, None]
                    )
                    return _backward_tile(*tile, allowed)

                def skip():
                    return tuple(map(jnp.zeros_like, (rows, columns, values)))

                added = jax.lax.switch(kind, (skip, whole, masked))
                carry = jax.tree.map(jnp.add, carry, added[1:])
                return carry, added[0]

            start = (jnp.zeros_like(columns), jnp.zeros_like(values))
            of_all = (*of_head_queries, positions[0], kinds_of_column)
            grads_of_keys, added = jax.lax.scan(of_queries, start, of_all)
            return grad_queries + added, grads_of_keys

        of_head_queries = (query_tiles, grad_tiles, lse_tiles, delta_tiles)
        of_all = (key_tiles, value_tiles, positions[1], kinds.T)
        grad_queries, grads = jax.lax.scan(of_keys, jnp.zeros_like(query_tiles), of_all)
        return grad_queries, *grads

    of_all = (queries, grads, lse, delta, keys, values)
    grad_query, grad_key, grad_value = jax.lax.map(of_head, of_all)
    return (
        layout.join_queries(grad_query) * config.scale,
        layout.join_keys(grad_key),
        layout.join_keys(grad_value),
    )


def _backward_tile(rows, grads, lse, delta, columns, values, allowed):
    """Return one tile's part of the gradients of (rows, columns, values).

    Scores are held transposed, (keys, queries): two of the three products that consume
    them then read them in storage order, a quarter faster than the other way round.
    """
    scores = columns @ rows.T
    if allowed is not None:
        scores = jnp.where(allowed, scores, -jnp.inf)
    weights = jnp.exp(scores - lse)
    grad_scores = weights * (values @ grads.T - delta)
    return grad_scores.T @ columns, grad_scores @ rows, weights @ grads
