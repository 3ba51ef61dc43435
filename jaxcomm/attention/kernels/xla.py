"""Attention of the local queries against one block of keys and values, by XLA.

Both functions take the public order of dimensions and global positions, and know
nothing of the ring; ``fused.py`` has them for cuDNN. Inside, tiles are heads-major, so
that a tile's scores stay in the L2 cache, and the query heads that share a key head are
rows of one matrix.

Source: Dao, FlashAttention-2, 2023.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels import tile_loops
from jaxcomm.attention.kernels.bias import BiasTiles
from jaxcomm.attention.kernels.operands import Grads, HopConfig, Operands
from jaxcomm.attention.kernels.scores import Tile
from jaxcomm.attention.kernels.tile_loops import TileLoop
from jaxcomm.attention.kernels.tiling import Tiling
from jaxcomm.attention.mask import SKIP, Tokens
from jaxcomm.attention.merge import at_least_half


def hop_forward(operands: Operands, *, config: HopConfig, loop: TileLoop | None = None):
    """Compute attention over one block of keys.

    Args:
      operands: the arrays.
      config: what is known before.
      loop: how to go through the tiles. If None, as on a CPU.

    Returns:
      (out, lse): (B, T, N, V) and (B, T, N), float32 (float64 for float64 inputs). Rows
      that see no key give 0 and -inf.
    """
    loop = loop or tile_loops.ON_CPU
    tiling = Tiling(operands, config, loop.tokens)
    work = _Work(operands, tiling, config)

    def nothing():
        shape = (*operands.query.shape[:3], operands.value.shape[3])
        out = jnp.zeros_like(operands.query, tiling.dtype, shape=shape)
        return out, jnp.full_like(out[..., 0], -jnp.inf)

    return work.if_visible(lambda: _forward(operands, tiling, work, loop), nothing)


def _forward(operands: Operands, tiling: Tiling, work: "_Work", loop: TileLoop):
    queries = tiling.split_queries(operands.query) * work.config.scale
    keys, values = map(tiling.split_keys, (operands.key, operands.value))

    def of_head(of):
        query_tiles, key_tiles, value_tiles, head = of
        head = work.of_head(head)

        def of_queries(of):
            rows, row, modes = of

            def of_keys(carry, of, choose):
                columns, values, column = of

                def compute(is_masked):
                    tile = work.tile(head, row, column, is_masked)
                    return _forward_tile(carry, rows, columns, values, tile)

                return choose(compute)

            top = jnp.full_like(rows[:, 0], -jnp.inf)
            out = jnp.zeros_like(rows, shape=(rows.shape[0], value_tiles.shape[2]))
            start = (top, jnp.zeros_like(top), out)
            of_all = (key_tiles, value_tiles, work.columns(head))
            top, total, out = loop.over(of_keys, start, of_all, modes)
            # A row that saw no key has out 0 and top -inf.
            total = at_least_half(total)
            share = 1 / total
            return out * share[:, None], top + jnp.log(total)

        return jax.lax.map(of_queries, (query_tiles, work.rows(head), head.modes))

    out, lse = jax.lax.map(of_head, (queries, keys, values, work.heads))
    return tiling.join_queries(out), tiling.join_queries(lse)


class _Head(NamedTuple):
    """What a key head needs; None or () where it is the same for all, or not given."""

    queries: Any
    keys: Any
    modes: Any
    index: Any
    slopes: Any
    seeds: Any


class _Place(NamedTuple):
    """The tokens of a tile of queries or of keys, and which tile it is."""

    tokens: Tokens
    index: Any


class _Work:
    """What is computed of each tile: the tokens, the modes and the terms of a hop."""

    def __init__(self, operands: Operands, tiling: Tiling, config: HopConfig):
        self.config, self.tiling = config, tiling
        self.has_documents = operands.queries.segment_ids is not None
        queries, keys = tiling.split_tokens(operands.queries, operands.keys)
        modes = config.mask.modes(queries, keys)
        terms = operands.terms
        self._shared = queries, keys, modes
        per_head: Any = (None, None, None)
        if not operands.has_shared_tokens:
            per_head = jax.tree.map(tiling.of_each_head, self._shared)
        self.bias = None if terms.bias is None else BiasTiles(terms.bias, tiling)

        def rows_of(x):
            return None if x is None else tiling.split_heads(x)

        # What lax.map hands to each head.
        self.heads = _Head(
            *per_head,
            index=None if self.bias is None else jnp.arange(tiling.all_heads),
            slopes=rows_of(terms.slopes),
            seeds=rows_of(terms.seeds),
        )

    def if_visible(self, compute, nothing):
        """Compute the hop, or nothing where its documents have nothing in common."""
        modes = self._shared[2]
        if not self.has_documents:
            return compute()
        return jax.lax.cond((modes != SKIP).any(), compute, nothing)

    def of_head(self, head: _Head) -> _Head:
        """Fill in what all heads share."""
        if head.modes is None:
            queries, keys, modes = self._shared
            return head._replace(queries=queries, keys=keys, modes=modes)
        return head

    def rows(self, head: _Head) -> _Place:
        """Return the query tiles of a head, for a loop over them."""
        return self._places(head.queries, self.tiling.queries.count)

    def columns(self, head: _Head) -> _Place:
        """Return the key tiles of a head, for a loop over them."""
        return self._places(head.keys, self.tiling.keys.count)

    def _places(self, tokens, count):
        return _Place(tokens, None if self.bias is None else jnp.arange(count))

    def tile(
        self, head: _Head, row: _Place, column: _Place, is_masked: bool, across=False
    ) -> Tile:
        """Return a tile for scores (rows, keys), or (keys, rows) if ``across``."""

        def of_rows(x):
            return x if x is None else (x[None] if across else x[:, None])

        def of_keys(x):
            return x if x is None else (x[:, None] if across else x)

        def of_tokens(x):
            # Rows count group, then token.
            return of_rows(None if x is None else jnp.tile(x, self.tiling.group))

        bias = None
        if self.bias is not None:
            bias = self.bias.rows(self.bias_place(head, row, column))
            bias = bias.T if across else bias
        return Tile(
            config=self.config,
            rows=Tokens(*map(of_tokens, row.tokens)),
            keys=Tokens(*map(of_keys, column.tokens)),
            is_masked=is_masked,
            bias=bias,
            slopes=of_rows(head.slopes),
            seeds=of_rows(head.seeds),
        )

    def bias_place(self, head: _Head, row: _Place, column: _Place):
        """Return where a tile's bias is."""
        assert self.bias is not None
        return self.bias.place(head.index, row.index, column.index)


def _forward_tile(carry, rows, columns, values, tile: Tile):
    """Add one tile to (running maximum, running sum, unnormalized output)."""
    top, total, out = carry
    scores, _ = tile.bend(rows @ columns.astype(rows.dtype).T)
    new_top = jnp.maximum(top, scores.max(1))
    finite_top = jnp.where(jnp.isneginf(new_top), 0, new_top)
    weights = jnp.exp(scores - finite_top[:, None])
    decay = jnp.exp(top - finite_top)
    total = total * decay + weights.sum(1)
    out = out * decay[:, None] + tile.thin(weights) @ values.astype(rows.dtype)
    return new_top, total, out


def hop_backward(
    operands: Operands,
    grad_out,
    lse,
    delta,
    *,
    config: HopConfig,
    loop: TileLoop | None = None,
):
    """Compute what one block of keys adds to the gradients.

    Args:
      operands, config, loop: as in :func:`hop_forward`.
      grad_out: (B, T, N, V), gradient of the output over all keys.
      lse: (B, T, N) float32, over all keys; -inf for rows that see none.
      delta: (B, T, N) float32, sum of ``grad_out * out`` over V, less the gradient of
        ``lse``.

    Returns:
      Gradients shaped as the operands, in float32 (float64 for float64 inputs).
    """
    loop = loop or tile_loops.ON_CPU
    tiling = Tiling(operands, config, loop.tokens)
    work = _Work(operands, tiling, config)
    terms = operands.terms
    given = (*operands[:3], terms.bias, terms.slopes)

    def nothing():
        return Grads(
            *(None if x is None else jnp.zeros_like(x, tiling.dtype) for x in given)
        )

    def compute():
        return _backward(operands, grad_out, lse, delta, tiling, work, loop)

    return work.if_visible(compute, nothing)


def _backward(
    operands: Operands,
    grad_out,
    lse,
    delta,
    tiling: Tiling,
    work: "_Work",
    loop: TileLoop,
) -> Grads:
    queries = tiling.split_queries(operands.query) * work.config.scale
    keys, values = map(tiling.split_keys, (operands.key, operands.value))
    # exp(score - inf) is 0: rows that see no key, and padding, give no gradient.
    lse = tiling.split_queries(jnp.where(jnp.isneginf(lse), jnp.inf, lse), jnp.inf)
    grads = tiling.split_queries(grad_out)
    delta = tiling.split_queries(delta)

    def of_head(grad_bias, of):
        of_head_queries, key_tiles, value_tiles, head = of
        query_tiles = of_head_queries[0]
        head = work.of_head(head)

        def of_keys(carry, of):
            columns, values, column, modes = of
            columns, values = columns.astype(tiling.dtype), values.astype(tiling.dtype)

            def of_queries(carry, of, choose):
                given, row, at = of

                def compute(is_masked):
                    tile = work.tile(head, row, column, is_masked, across=True)
                    return _backward_tile(given, columns, values, tile)

                added = choose(compute)
                grad_queries, summed, grad_bias = carry
                if work.bias is not None:
                    place = work.bias_place(head, row, column)
                    grad_bias = work.bias.add(grad_bias, place, added.scores.T)
                # By slices: at[at].add would be a scatter.
                sums = jax.lax.dynamic_index_in_dim(grad_queries, at, keepdims=False)
                grad_queries = jax.lax.dynamic_update_index_in_dim(
                    grad_queries, sums + added.rows, at, 0
                )
                summed = jax.tree.map(jnp.add, summed, added.summed)
                return grad_queries, summed, grad_bias

            grad_queries, slopes, grad_bias = carry
            start = (
                grad_queries,
                (jnp.zeros_like(columns), jnp.zeros_like(values), slopes),
                grad_bias,
            )
            of_all = (of_head_queries, work.rows(head), jnp.arange(len(query_tiles)))
            grad_queries, summed, grad_bias = loop.over(
                of_queries, start, of_all, modes
            )
            *grads_of_keys, slopes = summed
            return (grad_queries, slopes, grad_bias), grads_of_keys

        slopes = None
        if head.slopes is not None:
            slopes = jnp.zeros_like(head.slopes, tiling.dtype)
        carry = jnp.zeros_like(query_tiles), slopes, grad_bias
        of_all = (key_tiles, value_tiles, work.columns(head), head.modes.T)
        (grad_queries, slopes, grad_bias), summed = jax.lax.scan(of_keys, carry, of_all)
        return grad_bias, (grad_queries, *summed, slopes)

    grad_bias = None
    if work.bias is not None:
        grad_bias = jnp.zeros_like(work.bias.tiles, tiling.dtype)
    of_all = ((queries, grads, lse, delta), keys, values, work.heads)
    grad_bias, outs = jax.lax.scan(of_head, grad_bias, of_all)
    grad_query, grad_key, grad_value, grad_slopes = outs
    return Grads(
        tiling.join_queries(grad_query) * work.config.scale,
        tiling.join_keys(grad_key),
        tiling.join_keys(grad_value),
        None if work.bias is None else work.bias.join(grad_bias),
        None if grad_slopes is None else tiling.join_heads(grad_slopes),
    )


class _TileGrads(NamedTuple):
    """What a tile adds.

    Attributes:
      rows: to the gradient of the queries.
      summed: to those of keys, values and slopes; the last None if not given.
      scores: the gradient of the scores, (keys, rows), if there is a bias; else None.
    """

    rows: Any
    summed: tuple
    scores: Any


def _backward_tile(given, columns, values, tile: Tile) -> _TileGrads:
    """Compute one tile's part of the gradients.

    Scores are held transposed, (keys, queries): two of the three products that consume
    them then read them in storage order, a quarter faster than the other way round.
    """
    rows, grads, lse, delta = given
    scores, derivative = tile.bend(columns @ rows.T)
    weights = jnp.exp(scores - lse)
    grad_scores = weights * (tile.thin(values @ grads.T) - delta)
    if derivative is not None:
        grad_scores *= derivative
    slopes = None
    if tile.slopes is not None:
        slopes = -(grad_scores * tile.distances(grad_scores.dtype)).sum(0)
    return _TileGrads(
        grad_scores.T @ columns,
        (grad_scores @ rows, tile.thin(weights) @ grads, slopes),
        None if tile.bias is None else grad_scores,
    )
