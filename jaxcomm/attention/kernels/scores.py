"""What happens to the scores of a tile between the product and the softmax."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.kernel import Hop
from jaxcomm.attention.mask import Coordinates

# A bias below it hides its key, as -inf does. Float32 lacks digits there: a log-sum-exp
# of about -1e9 does not tell how many keys a row saw. The least number of float16,
# -65504, is often meant as a mask.
LEAST_BIAS = -50_000


@dataclasses.dataclass(frozen=True)
class Tile:
    """Tokens and terms of a tile, whose arrays broadcast to the tile's scores.

    The scores are (rows, keys), or (keys, rows): nothing here depends on which.

    Attributes:
      hop: what the tile is of.
      rows: tokens of the queries, one for each row.
      keys: tokens of the keys.
      is_masked: whether the mask leaves anything out.
      bias, slopes, seeds: as in ``Hop``, of each row; None if not given.
    """

    hop: Hop
    rows: Coordinates
    keys: Coordinates
    is_masked: bool
    bias: Any = None
    slopes: Any = None
    seeds: Any = None

    def bend(self, scores):
        """Return the scores with bias, ALiBi, cap and mask; and the cap's derivative.

        The derivative is None if it is 1.
        """
        if self.bias is not None:
            bias = self.bias.astype(scores.dtype)
            scores = jnp.where(bias < LEAST_BIAS, -jnp.inf, scores + bias)
        if self.slopes is not None:
            scores -= self.slopes * self.distances(scores.dtype)
        derivative, cap = None, self.hop.soft_cap
        if cap is not None:
            bounded = jnp.tanh(scores / cap)
            capped, derivative = cap * bounded, 1 - bounded * bounded
            if self.bias is not None:
                # What a bias hides, no cap shows.
                capped = jnp.where(scores == -jnp.inf, scores, capped)
            scores = capped
        if self.is_masked:
            allowed = self.hop.mask.allowed(self.rows, self.keys)
            scores = jnp.where(allowed, scores, -jnp.inf)
        return scores, derivative

    def distances(self, dtype):
        """Return how far each query is from each key."""
        # Padding keys are at the largest int32: the difference does not overflow.
        return abs(self.rows.positions - self.keys.positions).astype(dtype)

    def thin(self, weights):
        """Leave out what dropout leaves out, and scale the rest; linear."""
        rate = self.hop.dropout_rate
        if not rate:
            return weights
        bits = random_bits(self.seeds, self.rows.positions, self.keys.positions)
        kept = bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
        return jnp.where(kept, weights / (1 - rate), 0)


def random_bits(seeds, query_positions, key_positions) -> jax.Array:
    """Return 32 random bits for each pair, from the positions in the whole sequence.

    So they do not depend on how the sequence is split, nor on what computes a tile.

    Args:
      seeds: uint32.
      query_positions, key_positions: int32; all three broadcast together.
    """
    row = _mix(seeds ^ _mix(query_positions.astype(jnp.uint32)))
    column = _mix(key_positions.astype(jnp.uint32) ^ jnp.uint32(0x9E3779B9))
    return _mix(_mix(row ^ column) + row)


def _mix(x):
    """Scramble 32 bits. Source: Wellons, hash prospector, "lowbias32", 2018."""
    x ^= x >> 16
    x *= jnp.uint32(0x7FEB352D)
    x ^= x >> 15
    x *= jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
