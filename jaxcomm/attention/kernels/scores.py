"""What happens to the scores of a tile between the product and the softmax."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm.attention.mask import Coordinates, Mask

# A bias below it hides its key, as -inf does. Float32 lacks digits there: a log-sum-exp
# of about -1e9 does not tell how many keys a row saw. The least number of float16,
# -65504, is often meant as a mask.
LEAST_BIAS = -50_000


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a score is: ``cap(scale * query . key + bias - slope * distance)``.

    Attributes:
      scale: factor on the products.
      bias: (B, N, T, S) floating, or None. All dimensions but the last may be 1. A
        number below -50,000 hides its key.
      slopes: (B, N) in the dtype of sums, of ALiBi, or None.
      seeds: uint32 (B, N) of dropout, or None: see :func:`random_bits`.
      soft_cap: bound on the scores, by ``cap * tanh(score / cap)``, or None.
      dropout_rate: share of the weights that dropout leaves out.
    """

    scale: float
    bias: Any = None
    slopes: Any = None
    seeds: Any = None
    soft_cap: float | None = None
    dropout_rate: float = 0.0

    def replace(self, **changed: Any) -> "Scores":
        """Return scores with other attributes."""
        return dataclasses.replace(self, **changed)


jax.tree_util.register_dataclass(
    Scores, ["bias", "slopes", "seeds"], ["scale", "soft_cap", "dropout_rate"]
)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Tokens and terms of a tile, whose arrays broadcast to the tile's scores.

    The scores are (rows, keys), or (keys, rows): nothing here depends on which.

    Attributes:
      scores: those of the hop, with bias, slopes and seeds of each row.
      mask: of the hop.
      rows: tokens of the queries, one for each row.
      keys: tokens of the keys.
      is_masked: whether the mask leaves anything out.
    """

    scores: Scores
    mask: Mask
    rows: Coordinates
    keys: Coordinates
    is_masked: bool

    def bend(self, scores):
        """Return the scores with bias, ALiBi, cap and mask; and the cap's derivative.

        The derivative is None if it is 1.
        """
        bias, slopes, cap = self.scores.bias, self.scores.slopes, self.scores.soft_cap
        if bias is not None:
            bias = bias.astype(scores.dtype)
            scores = jnp.where(bias < LEAST_BIAS, -jnp.inf, scores + bias)
        if slopes is not None:
            scores -= slopes * self.distances(scores.dtype)
        derivative = None
        if cap is not None:
            bounded = jnp.tanh(scores / cap)
            capped, derivative = cap * bounded, 1 - bounded * bounded
            if bias is not None:
                # What a bias hides, no cap shows.
                capped = jnp.where(scores == -jnp.inf, scores, capped)
            scores = capped
        if self.is_masked:
            allowed = self.mask.allowed(self.rows, self.keys)
            scores = jnp.where(allowed, scores, -jnp.inf)
        return scores, derivative

    def distances(self, dtype):
        """Return how far each query is from each key."""
        # Padding keys are at the largest int32: the difference does not overflow.
        return abs(self.rows.positions - self.keys.positions).astype(dtype)

    def thin(self, weights):
        """Leave out what dropout leaves out, and scale the rest; linear."""
        rate = self.scores.dropout_rate
        if not rate:
            return weights
        bits = random_bits(self.scores.seeds, self.rows.positions, self.keys.positions)
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
