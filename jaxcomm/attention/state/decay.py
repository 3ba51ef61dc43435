"""Decays between the tokens of a chunk, and scores of pairs of tokens under them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm.attention.state.chunked import product

# Tokens whose decays of single channels are taken pair by pair. Products of matrices
# would need the inverse of a decay, which overflows.
_BLOCK = 16


class Decays(NamedTuple):
    """Decays in a chunk of C tokens, in which documents may begin.

    Attributes:
      total: (P, N, C) or (P, N, C, K), sums of gates up to each token.
      document: int32 (P, C), how many documents have begun in the chunk.
    """

    total: Any
    document: Any

    @classmethod
    def of(cls, gate, begins) -> "Decays":
        """Sum the gates of a chunk: (P, N, C) or (P, N, C, K), and bool (P, C)."""
        return cls(jnp.cumsum(gate, 2), jnp.cumsum(begins, 1, dtype=jnp.int32))

    @property
    def from_start(self):
        """The decay from before the chunk to each token; 0 behind a new document."""
        return self._masked(self.total, self.document == 0)

    @property
    def to_end(self):
        """The decay from each token to the end of the chunk."""
        last = self.document[:, -1:]
        return self._masked(self.total[:, :, -1:] - self.total, self.document == last)

    @property
    def through(self):
        """The decay of the whole chunk, (P, N, 1) or (P, N, K)."""
        through = self.from_start[:, :, -1]
        return through if self.total.ndim == 4 else through[..., None]

    def sees(self):
        """Return which tokens are seen, bool (P, 1, C, C): earlier ones and itself."""
        count = self.document.shape[1]
        earlier = jnp.tril(jnp.ones((count, count), bool))
        same = self.document[:, :, None] == self.document[:, None, :]
        return (same & earlier)[:, None]

    def _masked(self, exponent, is_seen):
        """Return exp, or 0; no exponent of what is not seen may overflow."""
        is_seen = is_seen[:, None, :]
        if exponent.ndim == 4:
            is_seen = is_seen[..., None]
        return jnp.where(is_seen, jnp.exp(jnp.where(is_seen, exponent, 0)), 0)


def scores(lefts, right, decays: Decays, dtype) -> list:
    """Return for each left ``sum_k left[i, k] right[j, k] decay(j to i)``, i from j on.

    Args:
      lefts: arrays (P, N, C, K).
      right: (P, N, C, K).
      decays: of the chunk.
      dtype: of the factors of products.

    Returns:
      Arrays (P, N, C, C) in the dtype of sums, 0 where a token is not seen.
    """
    seen, total = decays.sees(), decays.total
    if total.ndim == 3:
        between = total[..., :, None] - total[..., None, :]
        decay = jnp.where(seen, jnp.exp(jnp.where(seen, between, 0)), 0)
        return [product("pnik,pnjk->pnij", x, right, dtype) * decay for x in lefts]
    return [jnp.where(seen, x, 0) for x in _by_channel(lefts, right, total, dtype)]


def _by_channel(lefts, right, total, dtype) -> list:
    """Return the scores of blocks of tokens, whose channels decay each by itself.

    A block against earlier ones: both decays meet at its first token, where neither
    grows. A block against itself: pair by pair.
    """
    count = total.shape[2]
    size = min(_BLOCK, count)
    blocks = count // size

    def cut(x):
        return x.reshape(*x.shape[:2], blocks, size, x.shape[-1])

    in_blocks = cut(total)
    first = in_blocks[:, :, :, :1]
    # (P, N, blocks, C, K): tokens before each block, decayed to its first token.
    is_earlier = jnp.arange(count)[None, :] < (size * jnp.arange(blocks))[:, None]
    is_earlier = is_earlier[..., None]
    exponent = jnp.where(is_earlier, first - total[:, :, None], 0)
    before = jnp.where(is_earlier, jnp.exp(exponent) * right[:, :, None], 0)
    since = jnp.exp(in_blocks - first)
    diagonal = jnp.eye(blocks, dtype=bool)[:, None, :, None]
    found = []
    for left in map(cut, lefts):
        apart = product("pnbik,pnbjk->pnbij", left * since, before, dtype)
        apart = apart.reshape(*apart.shape[:4], blocks, size)
        together = _of_pairs(left, cut(right), in_blocks)
        both = apart + jnp.where(diagonal, together[:, :, :, :, None], 0)
        found.append(both.reshape(*both.shape[:2], count, count))
    return found


# The backward pass computes the decays of all pairs anew: they are many.
@jax.checkpoint
def _of_pairs(left, right, total):
    """Return the scores within blocks, (..., i, j), from (..., block, K)."""
    size = left.shape[-2]
    within = jnp.tril(jnp.ones((size, size), bool))[..., None]
    exponent = total[..., :, None, :] - total[..., None, :, :]
    decay = jnp.where(within, jnp.exp(jnp.where(within, exponent, 0)), 0)
    return (left[..., :, None, :] * right[..., None, :, :] * decay).sum(-1)
