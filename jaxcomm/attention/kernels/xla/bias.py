"""An additive bias cut into tiles, without repeating what is broadcast."""

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.xla.cut import Cut


class BiasTiles:
    """Tiles of a bias (B, N, T, S), of which all but S may be 1.

    Args:
      bias: the bias.
      queries, keys: how the tokens are cut.
      heads: key heads; ``group`` query heads share each.

    Attributes:
      tiles: (B K, query tiles, key tiles, G, tokens, keys), where what is broadcast has
        extent 1: batch and key heads as one dimension, query tiles, G and tokens.
    """

    def __init__(self, bias, queries: Cut, keys: Cut, heads: int, group: int):
        self._queries, self._keys, self._shape = queries, keys, bias.shape
        self._key_heads, self._group = heads, group
        batch, of_heads, tokens, columns = bias.shape
        self._heads = heads if of_heads > 1 else 1
        x = bias.reshape(batch * self._heads, of_heads // self._heads, tokens, columns)
        x = x[:, :, None] if tokens == 1 else queries.split(x, 2)
        self.tiles = jnp.transpose(keys.split(x, 4), (0, 2, 4, 1, 3, 5))

    def place(self, head, row, column):
        """Return where the tile of a head, query tile and key tile is."""
        batch, key_head = head // self._key_heads, head % self._key_heads
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
            tile = jnp.broadcast_to(tile, (self._group, self._queries.size, keys))
        return tile.reshape(-1, keys)

    def add(self, total, place, grad):
        """Add the gradient of a tile, (rows, keys), to ``total``, shaped as ``tiles``.

        ``total`` may be of another dtype than the bias.
        """
        grad = grad.reshape(self._group, self._queries.size, -1)
        group, tokens, _ = self.tiles.shape[3:]
        if group == 1:
            grad = grad.sum(0, keepdims=True)
        if tokens == 1:
            grad = grad.sum(1, keepdims=True)
        return total.at[place].add(grad)

    def join(self, total) -> jax.Array:
        """Undo the cutting, of gradients: return (B, N, T, S)."""
        x = self._keys.join(jnp.transpose(total, (0, 3, 1, 4, 2, 5)), 4)
        x = x[:, :, 0] if self._shape[2] == 1 else self._queries.join(x, 2)
        return x.reshape(self._shape)
