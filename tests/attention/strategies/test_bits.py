"""Which strategies give the same bits on any number of ranks, as the docs say."""

import jax
import numpy as np
import split

import jaxcomm

TOKENS, TILE = 512, 128


def outputs(strategy, ranks):
    """Return output and gradients, in the order of the tokens."""
    rng = np.random.default_rng(0)
    arrays = rng.standard_normal((4, 1, TOKENS, 4, 8)).astype(np.float32)
    layout = jaxcomm.Layout("contiguous", ranks, TOKENS)
    batch, tokens = layout.reorder(list(arrays))

    def local(query, key, value, ct, tokens):
        def attend(*arrays):
            return jaxcomm.ring_attention(
                *arrays, "context", tokens, is_causal=True, strategy=strategy
            )

        out, pull = jax.vjp(attend, query, key, value)
        return out, *pull(ct)

    mesh = split.ring_over(ranks)
    spec = jax.P(None, "context")
    program = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 5, out_specs=spec)
    )
    return [np.asarray(tokens.restore(x)) for x in program(*batch, tokens)]


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
