"""Which strategies give the same bits on any number of ranks, as the docs say."""

import numpy as np
import split
from dense import Options

TOKENS, TILE = 512, 128


def outputs(strategy, ranks):
    """Return output and gradients, in the order of the tokens."""
    *arrays, grads = split.inputs((1, TOKENS, 4, 8))
    how = {"size": ranks, "schedule": "contiguous", "return_residual": False}
    causal = Options(is_causal=True)
    found = split.attend(*arrays, causal, grads, strategy=strategy, **how)
    return found.out, *found[2:5]


def equal(strategy):
    """Say of the output and each gradient whether one rank and four give its bits."""
    pairs = zip(outputs(strategy, 1), outputs(strategy, 4), strict=True)
    return [np.array_equal(one, four) for one, four in pairs]


def test_gathered_keys_and_exchanged_heads_keep_bits_and_a_ring_does_not():
    """Each rank has whole tiles of queries."""
    assert TOKENS // 4 % TILE == 0
    assert equal("all_gather") == [True, True, False, False]
    assert equal("ulysses") == [True, True, True, True]
    assert not any(equal("ring"))
