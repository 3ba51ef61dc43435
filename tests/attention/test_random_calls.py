"""Random calls at the borders of real tiles, which have 128 tokens on CPUs."""

import dense
import numpy as np
import pytest
import split

from jaxcomm.attention import Ranges

TILE = 128
HEADS, KEY_HEADS = 12, 4
STRATEGIES = "ring", "all_gather", "halo", "ulysses"
# In `make test`: each strategy once, windows that end with a tile, and sinks of -inf
# beside padding.
FEW = 1, 19, 20, 22
SEEDS = [
    pytest.param(seed, marks=[] if seed in FEW else pytest.mark.thorough)
    for seed in range(60)
]


def near(rng, border):
    return int(border + rng.integers(-1, 2))


def documents(rng, length):
    """Return ids of documents that end near borders of tiles, and padding behind."""
    ends = [near(rng, TILE * rng.integers(1, length // TILE + 1)) for _ in range(3)]
    ids = (np.arange(length) >= np.array(ends)[:, None]).sum(0)
    ids[length - rng.integers(0, 4) :] = -1
    return ids[None]


def ranges(rng, length):
    """Return ranges of keys, queries or both that end near borders of tiles."""

    def pair():
        borders = TILE * rng.integers(0, length // TILE + 1, (2, length // 32 + 1))
        first, end = (borders + rng.integers(-1, 2, borders.shape)).repeat(32, 1)
        return first[None, :length], end[None, :length]

    which = rng.integers(1, 4)
    return Ranges(pair() if which & 1 else None, pair() if which & 2 else None)


def options_of(rng, strategy, length):
    """Draw options that combine. A halo has a window."""
    window = None
    if strategy == "halo" or rng.random() < 0.6:
        # The first and the last key that a tile, or it and the one before, still sees.
        left = near(rng, rng.choice([1, TILE - 1, 2 * TILE - 1]))
        window = left, near(rng, rng.choice([1, TILE - 1]))
    sinks = rng.standard_normal(HEADS)
    sinks[rng.random(HEADS) < 0.3] = -np.inf
    return dense.Options(
        is_causal=bool(rng.integers(2)),
        window=window,
        query_ids=documents(rng, length) if rng.random() < 0.6 else None,
        sinks=np.float32(sinks) if rng.random() < 0.7 else None,
        slopes=np.float32(rng.random(HEADS) / 64) if rng.random() < 0.4 else None,
        mask=ranges(rng, length) if rng.random() < 0.5 else None,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_call_equals_float64(seed):
    rng = np.random.default_rng(seed)
    strategy = STRATEGIES[seed % len(STRATEGIES)]
    size = int(rng.choice([2, 3]))
    # Of one tile or two on each rank, and about as many.
    more = int(rng.choice([0, 0, -1, 1]))
    length = size * TILE * int(rng.choice([1, 2])) + more
    shapes = (1, length, HEADS, 8), (1, length, KEY_HEADS, 8)
    *arrays, grads = split.inputs(*shapes, seed=seed, value_size=4)
    how = {"schedule": str(rng.choice(["contiguous", "zigzag", "striped"]))}
    options = options_of(rng, strategy, length)
    split.compare(
        *arrays, options, grads, size=size, strategy=strategy, tolerance=3e-5, **how
    )
