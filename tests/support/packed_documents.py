"""Documents that tests of packed attention have, by two of which a rank may be cut."""

import jax.numpy as jnp
import numpy as np

from jaxcomm.attention import segment_ids_of

TOKENS, SIZE = 48, 4
# Of bfloat16, relative to the largest number.
LIMIT = 0.03
# By four ranks of twelve tokens: no document is cut; few tokens are of one that is;
# most are; and numbers that come again.
WHOLE, SOME, ALL = [12, 5, 7, 4, 8, 12], [10, 4, 10, 9, 5, 10], [30, 18]
FEWEST = [11, 2, 11, 1, 11, 12]
AGAIN = np.repeat([3, 1, 3, 0], 12).astype(np.int32)
PADDED = np.where(np.arange(TOKENS) % 15 > 10, -1, np.arange(TOKENS) // 15)


def ids_of(lengths):
    """Return the ids of documents of these lengths, or the numbers of all tokens."""
    known = len(lengths) == TOKENS
    ids = np.asarray(lengths) if known else segment_ids_of(lengths, TOKENS)
    return ids[None].astype(np.int32)


def window_of(strategy):
    return (9, 0) if strategy == "halo" else None


def arrays_of(batch=1):
    rng = np.random.default_rng(0)
    shapes = [(batch, TOKENS, n, 8) for n in (4, 2, 2, 4)]
    *arrays, grad = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in shapes)
    return arrays, (grad, np.zeros((batch, TOKENS, 4), np.float32))
