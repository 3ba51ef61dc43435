"""An additive bias cut into tiles, without repeating what is broadcast."""

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.tiling import Tiling


class BiasTiles:
    """Tiles of a bias (B, N, T, S), of which all but S may be 1.

    Attributes:
      tiles: (B K, query tiles, key tiles, G, tokens, keys), where what is broadcast has
        extent 1: batch and key heads as one dimension, query tiles, G and tokens.
    """

    def __init__(self, bias, tiling: Tiling):
        self._tiling = tiling
        self._shape = bias.shape
        batch, heads, tokens, keys = bias.shape
        self._heads = tiling.heads if heads > 1 else 1
        group = heads // self._heads
        x = bias.reshape(batch * self._heads, group, tokens, keys)
        x = self._split_tokens(x)
        x = tiling.keys.split(x, 4)
        self.tiles = jnp.transpose(x, (0, 2, 4, 1, 3, 5))

    def _split_tokens(self, x):
        """(B K, G, T, S) to (B K, G, tiles, tokens, S)."""
        return x[:, :, None] if x.shape[2] == 1 else self._tiling.queries.split(x, 2)

    def place(self, head, row, column):
        """Return where the tile of a head, query tile and key tile is."""
        batch, key_head = head // self._tiling.heads, head % self._tiling.heads
        place = 0
        if self._shape[0] > 1:
            place += batch * self._heads
        if self._heads > 1:
            place += key_head
        return place, (row if self._shape[2] > 1 else 0), column

    def rows(self, place):
        """Return a tile as (rows, keys), or (1, keys) if all rows are alike."""
        tile = self.tiles[place]
        group, tokens, keys = tile.shape
        if (group, tokens) != (1, 1):
            shape = (self._tiling.group, self._tiling.queries.size, keys)
            tile = jnp.broadcast_to(tile, shape)
        return tile.reshape(-1, keys)

    def add(self, total, place, grad):
        """Add the gradient of a tile, (rows, keys), to ``total``, shaped as ``tiles``.

        ``total`` may be of another dtype than the bias.
        """
        grad = grad.reshape(self._tiling.group, self._tiling.queries.size, -1)
        group, tokens, _ = self.tiles.shape[3:]
        if group == 1:
            grad = grad.sum(0, keepdims=True)
        if tokens == 1:
            grad = grad.sum(1, keepdims=True)
        return total.at[place].add(grad)

    def join(self, total) -> jax.Array:
        """Undo the cutting, of gradients: return (B, N, T, S)."""
        x = jnp.transpose(total, (0, 3, 1, 4, 2, 5))
        x = self._tiling.keys.join(x, 4)
        x = x[:, :, 0] if self._shape[2] == 1 else self._tiling.queries.join(x, 2)
        return x.reshape(self._shape)
