"""Which keys a query sees, and what that means for a whole tile."""

import dataclasses

import jax
import jax.numpy as jnp

# What a tile needs. The numbers index the branches of jax.lax.switch.
SKIP, FULL, MASKED = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Visibility:
    """The rule by which a query sees a key, from their global positions.

    Attributes:
      is_causal: whether a query sees only keys at its own position or before.
      query_length: queries at this position or later see nothing.
      key_length: keys at this position or later are not seen.
    """

    is_causal: bool
    query_length: int
    key_length: int

    def allowed(self, query_positions, key_positions) -> jax.Array:
        """Return which keys each query sees, as bool.

        Args:
          query_positions, key_positions: int32, of shapes that broadcast together.
        """
        seen = (query_positions < self.query_length) & (key_positions < self.key_length)
        if self.is_causal:
            seen &= query_positions >= key_positions
        return seen

    def kinds(self, query_tiles, key_tiles) -> jax.Array:
        """Say for each pair of tiles whether to skip it, take it whole, or mask it.

        Args:
          query_tiles: int32 (tiles, tokens of a tile), positions of the queries.
          key_tiles: int32 (tiles, tokens of a tile), positions of the keys.

        Returns:
          int32 (query tiles, key tiles) of SKIP, FULL and MASKED.
        """
        first_query, last_query = (
            query_tiles.min(1)[:, None],
            query_tiles.max(1)[:, None],
        )
        first_key, last_key = key_tiles.min(1), key_tiles.max(1)
        any_seen = (first_query < self.query_length) & (first_key < self.key_length)
        all_seen = (last_query < self.query_length) & (last_key < self.key_length)
        if self.is_causal:
            any_seen &= last_query >= first_key
            all_seen &= first_query >= last_key
        kinds = jnp.where(all_seen, FULL, jnp.where(any_seen, MASKED, SKIP))
        return kinds.astype(jnp.int32)
