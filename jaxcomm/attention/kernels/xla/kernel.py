"""Attention of the local queries against one block of keys and values, by XLA.

Tiles are heads-major, so that a tile's scores stay in the L2 cache, and the query heads
that share a key head are rows of one matrix.

Source: Dao, FlashAttention-2, 2023.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.kernel import (
    OPTIONS,
    Grads,
    Hop,
    Kernel,
    Saved,
    at_least_half,
)
from jaxcomm.attention.kernels.scores import Tile
from jaxcomm.attention.kernels.xla.tiles import Tiles
from jaxcomm.attention.mask import FULL, SKIP

# Takes a function of whether the tile needs the mask; returns what it returns.
Choose = Callable[[Callable[[bool], Any]], Any]
Step = Callable[[Any, Any, Choose], Any]


def over_visible(step: Step, carry, tiles, modes):
    """Return what ``step`` makes of ``carry``, one visible tile after the other.

    The number of turns is data. So JAX cannot apply reverse mode to it.

    Args:
      step: ``step(carry, tile, choose) -> carry``. What differs with the mask is
        computed by ``choose(compute)``: by ``compute(is_masked)``, a Python bool.
      carry: what the first step takes.
      tiles: a pytree of arrays (tiles, ...).
      modes: int32 (tiles,), of ``Mask.modes``.
    """
    if not modes.size:
        return carry
    order = jnp.argsort(modes == SKIP, stable=True)

    def turn(i, carry):
        def of_turn(x):
            return jax.lax.dynamic_index_in_dim(x, order[i], keepdims=False)

        tile, mode = jax.tree.map(of_turn, (tiles, modes))
        return step(carry, tile, _by(mode))

    return jax.lax.fori_loop(0, (modes != SKIP).sum(), turn, carry)


def over_all(step: Step, carry, tiles, modes):
    """Do what :func:`over_visible` does, in a loop that JAX can differentiate.

    It reads the tiles that it skips. With 16 documents it took twice as long.
    """

    def turn(carry, of):
        tile, mode = of

        def compute(carry):
            return step(carry, tile, _by(mode))

        return jax.lax.cond(mode == SKIP, lambda carry: carry, compute, carry), None

    return jax.lax.scan(turn, carry, (tiles, modes))[0]


def _by(mode) -> Choose:
    def choose(compute):
        return jax.lax.cond(mode == FULL, lambda: compute(False), lambda: compute(True))

    return choose


# The most rows of a tile, and the most keys. The scores of a tile, 64 KiB of float32,
# stay in the cache next to a core. With 512 tokens the backward pass took a sixth
# longer, and with documents a third.
ON_CPU = 128
# Each tile costs launches, and the host waits for it.
ON_GPU = 512


@dataclasses.dataclass(frozen=True)
class Xla(Kernel):
    """XLA's operations, tile by tile: every option, every platform, both derivatives.

    Attributes:
      tokens: the most rows of a tile, and the most keys. If None, as is best for the
        platform.
      over: the loop over tiles, such as :func:`over_visible`.
    """

    tokens: int | None = None
    over: Callable = over_visible
    name = "xla"
    options = frozenset(OPTIONS)

    def why_not(self, hop):
        return None

    def _tiles(self, hop: Hop) -> Tiles:
        is_gpu = hop.platform in ("cuda", "rocm")
        return Tiles(hop, self.tokens or (ON_GPU if is_gpu else ON_CPU))

    def forward(self, hop):
        tiles = self._tiles(hop)

        def nothing():
            shape = (*hop.query.shape[:3], hop.value.shape[3])
            out = jnp.zeros_like(hop.query, tiles.dtype, shape=shape)
            return out, jnp.full_like(out[..., 0], -jnp.inf)

        return tiles.if_visible(lambda: _forward(hop, tiles, self.over), nothing)

    def backward(self, hop, saved):
        tiles, scores = self._tiles(hop), hop.scores
        given = hop.query, hop.key, hop.value, scores.bias, scores.slopes

        def nothing():
            return Grads(
                *(None if x is None else jnp.zeros_like(x, tiles.dtype) for x in given)
            )

        return tiles.if_visible(
            lambda: _backward(hop, saved, tiles, self.over), nothing
        )


def _forward(hop: Hop, tiles: Tiles, over: Callable):
    queries = tiles.split_queries(hop.query) * hop.scores.scale
    keys, values = map(tiles.split_keys, (hop.key, hop.value))

    def of_head(of):
        query_tiles, key_tiles, value_tiles, head = of
        head = tiles.of_head(head)

        def of_queries(of):
            rows, row, modes = of

            def of_keys(carry, of, choose):
                columns, values, column = of

                def compute(is_masked):
                    tile = tiles.tile(head, row, column, is_masked)
                    return _forward_tile(carry, rows, columns, values, tile)

                return choose(compute)

            top = jnp.full_like(rows[:, 0], -jnp.inf)
            out = jnp.zeros_like(rows, shape=(rows.shape[0], value_tiles.shape[2]))
            start = (top, jnp.zeros_like(top), out)
            of_all = (key_tiles, value_tiles, tiles.columns(head))
            top, total, out = over(of_keys, start, of_all, modes)
            # A row that saw no key has out 0 and top -inf.
            total = at_least_half(total)
            share = 1 / total
            return out * share[:, None], top + jnp.log(total)

        return jax.lax.map(of_queries, (query_tiles, tiles.rows(head), head.modes))

    out, lse = jax.lax.map(of_head, (queries, keys, values, tiles.heads))
    return tiles.join_queries(out), tiles.join_queries(lse)


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


def _backward(hop: Hop, saved: Saved, tiles: Tiles, over: Callable) -> Grads:
    queries = tiles.split_queries(hop.query) * hop.scores.scale
    keys, values = map(tiles.split_keys, (hop.key, hop.value))
    # exp(score - inf) is 0: padding gives no gradient.
    lse = tiles.split_queries(saved.lse, jnp.inf)
    grads, delta = map(tiles.split_queries, (saved.grad_out, saved.delta))

    def of_head(grad_bias, of):
        of_head_queries, key_tiles, value_tiles, head = of
        query_tiles = of_head_queries[0]
        head = tiles.of_head(head)

        def of_keys(carry, of):
            columns, values, column, modes = of
            columns, values = columns.astype(tiles.dtype), values.astype(tiles.dtype)

            def of_queries(carry, of, choose):
                given, row, at = of

                def compute(is_masked):
                    tile = tiles.tile(head, row, column, is_masked, across=True)
                    return _backward_tile(given, columns, values, tile)

                of_rows, of_columns, of_scores = choose(compute)
                grad_queries, summed, grad_bias = carry
                if tiles.bias is not None:
                    place = tiles.bias_place(head, row, column)
                    grad_bias = tiles.bias.add(grad_bias, place, of_scores.T)
                # By slices: at[at].add would be a scatter.
                sums = jax.lax.dynamic_index_in_dim(grad_queries, at, keepdims=False)
                grad_queries = jax.lax.dynamic_update_index_in_dim(
                    grad_queries, sums + of_rows, at, 0
                )
                summed = jax.tree.map(jnp.add, summed, of_columns)
                return grad_queries, summed, grad_bias

            grad_queries, slopes, grad_bias = carry
            start = (
                grad_queries,
                (jnp.zeros_like(columns), jnp.zeros_like(values), slopes),
                grad_bias,
            )
            of_all = (of_head_queries, tiles.rows(head), jnp.arange(len(query_tiles)))
            grad_queries, summed, grad_bias = over(of_queries, start, of_all, modes)
            *grads_of_keys, slopes = summed
            return (grad_queries, slopes, grad_bias), grads_of_keys

        slopes = None
        if head.slopes is not None:
            slopes = jnp.zeros_like(head.slopes, tiles.dtype)
        carry = jnp.zeros_like(query_tiles), slopes, grad_bias
        of_all = (key_tiles, value_tiles, tiles.columns(head), head.modes.T)
        (grad_queries, slopes, grad_bias), summed = jax.lax.scan(of_keys, carry, of_all)
        return grad_bias, (grad_queries, *summed, slopes)

    grad_bias = None
    if tiles.bias is not None:
        grad_bias = jnp.zeros_like(tiles.bias.tiles, tiles.dtype)
    of_all = ((queries, grads, lse, delta), keys, values, tiles.heads)
    grad_bias, outs = jax.lax.scan(of_head, grad_bias, of_all)
    grad_query, grad_key, grad_value, grad_slopes = outs
    return Grads(
        tiles.join_queries(grad_query) * hop.scores.scale,
        tiles.join_keys(grad_key),
        tiles.join_keys(grad_value),
        None if tiles.bias is None else tiles.bias.join(grad_bias),
        None if grad_slopes is None else tiles.join_heads(grad_slopes),
    )


def _backward_tile(given, columns, values, tile: Tile):
    """Compute one tile's part of the gradients.

    Scores are held transposed, (keys, queries): two of the three products that consume
    them then read them in storage order, a quarter faster than the other way round.

    Returns:
      What it adds to the gradient of the queries; to those of keys, values and slopes,
      the last None if not given; and the gradient of the scores, if there is a bias.
    """
    rows, grads, lse, delta = given
    scores, derivative = tile.bend(columns @ rows.T)
    weights = jnp.exp(scores - lse)
    grad_scores = weights * (tile.thin(values @ grads.T) - delta)
    if derivative is not None:
        grad_scores *= derivative
    slopes = None
    if tile.scores.slopes is not None:
        slopes = -(grad_scores * tile.distances(grad_scores.dtype)).sum(0)
    return (
        grad_scores.T @ columns,
        (grad_scores @ rows, tile.thin(weights) @ grads, slopes),
        None if tile.scores.bias is None else grad_scores,
    )


XLA = Xla()
# Of which JAX can take derivatives.
DIFFERENTIABLE = Xla(ON_GPU, over_all)
