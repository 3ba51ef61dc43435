"""A hop as tiles: its arrays in tiles' order, and what each tile needs."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.kernel import Hop
from jaxcomm.attention.kernels.scores import Tile
from jaxcomm.attention.mask import SKIP, Coordinates


@dataclasses.dataclass(frozen=True)
class Cut:
    """Equal tiles over consecutive segments, each segment padded at its end.

    Attributes:
      segments: tokens of each segment, all positive.
      size: tokens of a tile.
    """

    segments: tuple[int, ...]
    size: int

    @classmethod
    def fit(cls, segments: tuple[int, ...], largest: int) -> "Cut":
        """Choose the tile that covers the longest segment with the least padding.

        >>> Cut.fit((1000, 999), 512)
        Cut(segments=(1000, 999), size=500)
        """
        segments = tuple(segment for segment in segments if segment)
        longest = max(segments, default=1)
        return cls(segments, -(-longest // -(-longest // largest)))

    @property
    def count(self) -> int:
        return sum(-(-segment // self.size) for segment in self.segments)

    def split(self, x, axis: int, fill: float | str = 0):
        """Replace dimension ``axis`` by two: which tile, and which token of the tile.

        Args:
          x: array with ``sum(segments)`` tokens in dimension ``axis``.
          axis: the dimension that counts tokens, not negative.
          fill: value of the padding, or ``"edge"`` to repeat each segment's last token.

        Returns:
          Array whose dimensions ``axis`` and ``axis + 1`` are ``(count, size)``.
        """
        parts, start = [], 0
        for segment in self.segments:
            part = x[(slice(None),) * axis + (slice(start, start + segment),)]
            start += segment
            padding = [(0, 0)] * x.ndim
            padding[axis] = (0, -segment % self.size)
            if fill == "edge":
                parts.append(jnp.pad(part, padding, mode="edge"))
            else:
                parts.append(jnp.pad(part, padding, constant_values=fill))
        whole = jnp.concatenate(parts, axis) if parts else x
        shape = (*x.shape[:axis], self.count, self.size, *x.shape[axis + 1 :])
        return whole.reshape(shape)

    def join(self, x, axis: int):
        """Undo :meth:`split`: merge dimensions ``axis, axis + 1``, dropping padding."""
        tokens = self.count * self.size
        whole = x.reshape(*x.shape[:axis], tokens, *x.shape[axis + 2 :])
        if tokens == sum(self.segments):
            return whole
        parts, start = [], 0
        for segment in self.segments:
            part = (slice(None),) * axis + (slice(start, start + segment),)
            parts.append(whole[part])
            start += segment + -segment % self.size
        return jnp.concatenate(parts, axis)


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


# With many query heads per key head a tile keeps at least so many queries.
_FEWEST_QUERIES = 64
# The position of keys that fill up a tile: beyond all.
_BEYOND = jnp.iinfo(jnp.int32).max


class Head(NamedTuple):
    """What a key head needs; None or () where it is the same for all, or not given."""

    queries: Any
    keys: Any
    modes: Any
    index: Any
    slopes: Any
    seeds: Any


class Place(NamedTuple):
    """The tokens of a tile of queries or of keys, and which tile it is."""

    tokens: Coordinates
    index: Any


class Tiles:
    """The tiles of a hop. Key heads of the whole batch come first: B K.

    Args:
      hop: the hop.
      tokens: the most rows of a tile, and the most keys.

    Attributes:
      dtype: of sums.
      bias: the tiles of the bias, or None.
      heads: what ``jax.lax.map`` hands to each head.
    """

    def __init__(self, hop: Hop, tokens: int):
        self.hop, self.dtype = hop, hop.sum_dtype
        self._batch, self._length, query_heads, _ = hop.query.shape
        self._key_heads = hop.key.shape[2]
        self._all_heads = self._batch * self._key_heads
        self._group = query_heads // self._key_heads
        rows = max(_FEWEST_QUERIES, tokens // self._group)
        self._queries = Cut.fit(hop.pairs.segments[0], rows)
        self._keys = Cut.fit(hop.pairs.segments[1], tokens)
        self.bias = None
        if hop.scores.bias is not None:
            shape = self._key_heads, self._group
            self.bias = BiasTiles(hop.scores.bias, self._queries, self._keys, *shape)
        queries, keys = self._split_tokens()
        self._shared = queries, keys, hop.pairs.mask.modes(queries, keys)
        per_head: Any = (None, None, None)
        if not hop.pairs.has_shared_tokens:
            per_head = jax.tree.map(
                lambda x: jnp.repeat(x, self._key_heads, 0), self._shared
            )
        self.heads = Head(
            *per_head,
            index=None if self.bias is None else jnp.arange(self._all_heads),
            slopes=self._split_heads(hop.scores.slopes),
            seeds=self._split_heads(hop.scores.seeds),
        )

    def if_visible(self, compute, nothing):
        """Compute the hop, or nothing where documents or ranges leave nothing."""
        queries, keys = self.hop.pairs.queries, self.hop.pairs.keys
        if (queries.segment_ids, queries.range, keys.range) == (None,) * 3:
            return compute()
        return jax.lax.cond((self._shared[2] != SKIP).any(), compute, nothing)

    def of_head(self, head: Head) -> Head:
        """Fill in what all heads share."""
        if head.modes is None:
            queries, keys, modes = self._shared
            return head._replace(queries=queries, keys=keys, modes=modes)
        return head

    def rows(self, head: Head) -> Place:
        """Return the query tiles of a head, for a loop over them."""
        return self._places(head.queries, self._queries.count)

    def columns(self, head: Head) -> Place:
        """Return the key tiles of a head, for a loop over them."""
        return self._places(head.keys, self._keys.count)

    def _places(self, tokens, count):
        return Place(tokens, None if self.bias is None else jnp.arange(count))

    def tile(
        self, head: Head, row: Place, column: Place, is_masked: bool, across=False
    ) -> Tile:
        """Return a tile for scores (rows, keys), or (keys, rows) if ``across``."""

        def of_rows(x):
            return x if x is None else (x[None] if across else x[:, None])

        def of_keys(x):
            return x[:, None] if across else x

        def of_tokens(x):
            # Rows count group, then token.
            return of_rows(jnp.tile(x, self._group))

        bias = None
        if self.bias is not None:
            bias = self.bias.rows(self.bias_place(head, row, column))
            bias = bias.T if across else bias
        return Tile(
            scores=self.hop.scores.replace(
                bias=bias, slopes=of_rows(head.slopes), seeds=of_rows(head.seeds)
            ),
            mask=self.hop.pairs.mask,
            rows=jax.tree.map(of_tokens, row.tokens),
            keys=jax.tree.map(of_keys, column.tokens),
            is_masked=is_masked,
        )

    def bias_place(self, head: Head, row: Place, column: Place):
        """Return where a tile's bias is."""
        assert self.bias is not None
        return self.bias.place(head.index, row.index, column.index)

    def split_queries(self, x, fill: float = 0):
        """(B, T, N[, D]) to (B K, tiles, rows[, D]); rows count group, then token."""
        heads = (self._key_heads, self._group)
        x = x.reshape(self._batch, self._length, *heads, *x.shape[3:])
        x = self._queries.split(jnp.moveaxis(x, 1, 3), 3, fill)
        x = jnp.moveaxis(x, 3, 2).astype(self.dtype)
        rows = self._group * self._queries.size
        return x.reshape(self._all_heads, self._queries.count, rows, *x.shape[5:])

    def join_queries(self, x):
        """Undo :meth:`split_queries`."""
        shape = (self._batch, self._key_heads, self._queries.count, self._group)
        x = x.reshape(*shape, self._queries.size, *x.shape[3:])
        x = self._queries.join(jnp.moveaxis(x, 2, 3), 3)
        x = jnp.moveaxis(x, 3, 1)
        return x.reshape(*x.shape[:2], self._key_heads * self._group, *x.shape[4:])

    def split_keys(self, x):
        """(B, S, K, D) to (B K, tiles, keys, D), in the dtype of ``x``."""
        x = self._keys.split(jnp.moveaxis(x, 1, 2), 2)
        return x.reshape(self._all_heads, *x.shape[2:])

    def join_keys(self, x):
        """Undo :meth:`split_keys`."""
        x = x.reshape(self._batch, self._key_heads, *x.shape[1:])
        return jnp.moveaxis(self._keys.join(x, 2), 2, 1)

    def join_heads(self, x):
        """Sum (B K, rows) over the tokens of a tile, to (B, N)."""
        x = x.reshape(self._all_heads, self._group, self._queries.size).sum(2)
        return x.reshape(self._batch, self._key_heads * self._group)

    def _split_heads(self, x):
        """(B, N) to (B K, rows)."""
        if x is None:
            return None
        x = x.reshape(self._all_heads, self._group)
        return jnp.repeat(x, self._queries.size, 1)

    def _split_tokens(self):
        """Cut tokens into ([B,] tiles, tokens of a tile); padding keys are beyond all.

        Both have a dimension B if one of them has.
        """
        is_shared = self.hop.pairs.has_shared_tokens

        def split(tokens: Coordinates, cut: Cut, fill):
            def one(x, fill):
                if not is_shared and x.ndim == 1:
                    x = jnp.broadcast_to(x, (self._batch, *x.shape))
                return cut.split(x, x.ndim - 1, fill)

            # Padding repeats a real token: it must not change a tile's mode.
            found = jax.tree.map(lambda x: one(x, "edge"), tokens)
            return found._replace(positions=one(tokens.positions, fill))

        pairs = self.hop.pairs
        queries = split(pairs.queries, self._queries, "edge")
        return queries, split(pairs.keys, self._keys, _BEYOND)
