"""Translate between the public order of dimensions and the tiles of one hop."""

import jax.numpy as jnp

from jaxcomm.attention.kernels.operands import HopConfig, Operands, sum_dtype
from jaxcomm.attention.kernels.tiles import Tiles
from jaxcomm.attention.mask import Tokens

# With many query heads per key head a tile keeps at least so many queries.
_FEWEST_QUERIES = 64
# The position of keys that fill up a tile: beyond all.
_BEYOND = jnp.iinfo(jnp.int32).max


class Tiling:
    """The tiles of one hop's shapes.

    Args:
      operands, config: the hop's.
      tokens: the most rows of a tile, and the most keys.

    Attributes:
      heads: key heads; ``group`` query heads share each.
      all_heads: key heads of the whole batch.
      dtype: of sums.
      queries, keys: how the tokens are cut.
    """

    def __init__(self, operands: Operands, config: HopConfig, tokens: int):
        query, key = operands.query, operands.key
        self.batch, self.length, self.query_heads, _ = query.shape
        self.heads = key.shape[2]
        self.all_heads = self.batch * self.heads
        self.group = self.query_heads // self.heads
        self.dtype = sum_dtype(query.dtype)
        queries = max(_FEWEST_QUERIES, tokens // self.group)
        self.queries = Tiles.fit(config.query_segments, queries)
        self.keys = Tiles.fit(config.key_segments, tokens)

    def split_queries(self, x, fill: float = 0):
        """(B, T, N[, D]) to (B K, tiles, rows[, D]); rows count group, then token."""
        heads = (self.heads, self.group)
        x = x.reshape(self.batch, self.length, *heads, *x.shape[3:])
        x = self.queries.split(jnp.moveaxis(x, 1, 3), 3, fill)
        x = jnp.moveaxis(x, 3, 2).astype(self.dtype)
        rows = self.group * self.queries.size
        return x.reshape(self.all_heads, self.queries.count, rows, *x.shape[5:])

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
        return x.reshape(self.all_heads, *x.shape[2:])

    def join_keys(self, x):
        """Undo :meth:`split_keys`."""
        x = x.reshape(self.batch, self.heads, *x.shape[1:])
        return jnp.moveaxis(self.keys.join(x, 2), 2, 1)

    def split_tokens(self, queries: Tokens, keys: Tokens) -> tuple[Tokens, Tokens]:
        """Cut tokens into ([B,] tiles, tokens of a tile); padding keys are beyond all.

        Both have a dimension B if one of them has.
        """
        is_shared = queries.is_shared and keys.is_shared

        def split(tokens, tiles, fill):
            def one(x, fill):
                if not is_shared and x.ndim == 1:
                    x = jnp.broadcast_to(x, (self.batch, *x.shape))
                return tiles.split(x, x.ndim - 1, fill)

            ids = tokens.segment_ids
            # Padding repeats a real token: it must not change a tile's mode.
            ids = None if ids is None else one(ids, "edge")
            return Tokens(one(tokens.positions, fill), ids)

        return split(queries, self.queries, "edge"), split(keys, self.keys, _BEYOND)

    def of_each_head(self, x):
        """(B, ...) to (B K, ...)."""
        return jnp.repeat(x, self.heads, 0)

    def split_heads(self, x):
        """(B, N) to (B K, rows)."""
        x = jnp.repeat(x.reshape(self.all_heads, self.group), self.queries.size, 1)
        return x.reshape(self.all_heads, self.group * self.queries.size)

    def join_heads(self, x):
        """Sum (B K, rows) over the tokens of a tile, to (B, N)."""
        x = x.reshape(self.all_heads, self.group, self.queries.size).sum(2)
        return x.reshape(self.batch, self.query_heads)
