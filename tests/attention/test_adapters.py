"""Layers of other libraries, and jax.checkpoint, over a split sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from split import SPLIT, sharded

import jaxcomm
from jaxcomm.attention import attention_fn, equinox_attention, save_attention

LENGTH, WIDTH = 24, 16
LAYOUT = jaxcomm.Layout("zigzag", 4, LENGTH)
X = np.random.default_rng(0).standard_normal((2, LENGTH, WIDTH)).astype(np.float32)


def over_ranks(function, *trees):
    """Apply a function of what one rank holds to the whole sequence."""
    whole = sharded(function, 4, (SPLIT, SPLIT, *[jax.P()] * len(trees)))
    x, tokens = LAYOUT.reorder(X)
    return tokens.restore(np.asarray(jax.jit(whole)(x, tokens, *trees)))


def _attend(tokens):
    return attention_fn("context", tokens, is_causal=True)


@pytest.mark.parametrize("says", ["maker", "layer", "nobody"])
def test_the_maker_or_the_layer_says_that_it_is_causal(says):
    """Whoever says so alone is heard; flax passes it where it makes no mask."""

    def local(x, tokens):
        attend = attention_fn("context", tokens, is_causal=says == "maker")
        x = x[:, :, None]
        return attend(x, x, x, is_causal=says == "layer")[:, :, 0]

    x = X[:, :, None]
    expected = jax.nn.dot_product_attention(x, x, x, is_causal=says != "nobody")
    found = over_ranks(local)
    np.testing.assert_allclose(found, expected[:, :, 0], atol=1e-5)


def test_flax_nnx_attends_as_on_one_device():
    nnx = pytest.importorskip("flax.nnx")

    model = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    expected = nnx.merge(graph, state)(X, is_causal=True)

    def local(x, tokens, state):
        model = nnx.merge(graph, state)
        model.set_attributes(attention_fn=_attend(tokens))
        return model(x)

    found = over_ranks(local, state)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_equinox_attends_as_on_one_device():
    equinox = pytest.importorskip("equinox")
    layer = equinox.nn.MultiheadAttention(4, WIDTH, key=jax.random.key(0))
    rotate = equinox.nn.RotaryPositionalEmbedding(WIDTH // 4)
    at = jnp.arange(LENGTH)
    distance = at[:, None] - at[None]
    causal, near = distance >= 0, abs(distance) < 7

    def heads(positions):
        def turn(x):
            table = jax.vmap(rotate, 1, 1)(jnp.ones((LENGTH, *x.shape[1:])))
            return x * table[jnp.maximum(positions, 0)]

        return lambda query, key, value: (turn(query), turn(key), value)

    def whole(x):
        return layer(x, x, x, causal & near, process_heads=heads(at))

    arrays, static = equinox.partition(layer, equinox.is_array)

    def local(x, tokens, arrays):
        layer = equinox.combine(arrays, static)

        def one(x, tokens):
            attend = equinox_attention(layer, _attend(tokens))
            rows = near[jnp.maximum(tokens.positions, 0)]
            return attend(x, x, x, rows, process_heads=heads(tokens.positions))

        return jax.vmap(one)(x, tokens)

    found = over_ranks(local, arrays)
    np.testing.assert_allclose(found, jax.vmap(whole)(X), atol=1e-5)


def test_dropout_of_equinox_is_that_of_ring_attention():
    equinox = pytest.importorskip("equinox")
    layer = equinox.nn.MultiheadAttention(
        4, WIDTH, dropout_p=0.5, key=jax.random.key(0)
    )

    def local(x, tokens, keys):
        def one(x, tokens, key):
            attend = equinox_attention(layer, _attend(tokens))
            drops, infers = (
                attend(x, x, x, key=key, inference=inference)
                for inference in (None, True)
            )
            return jnp.stack([drops, infers], 1)

        return jax.vmap(one)(x, tokens, keys)

    first, again, other = (
        over_ranks(local, jax.random.split(jax.random.key(seed), 2))
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first[:, :, 1], other[:, :, 1])
    assert not np.allclose(first[:, :, 0], other[:, :, 0])
    assert not np.allclose(first[:, :, 0], first[:, :, 1])


def test_a_rematerialised_layer_runs_the_forward_ring_once():
    """Layers in a scan, with the check of the positions, as users have them."""
    layout = jaxcomm.Layout("zigzag", 4, 16)

    def gradient(**options):
        def local(x, tokens):
            def layer(x, _):
                y = jnp.sin(x)
                return y + jaxcomm.ring_attention(
                    y, y, y, "context", tokens, is_causal=True
                ), None

            return jax.lax.scan(jax.checkpoint(layer, **options), x, length=3)[0]

        return jax.jit(jax.grad(lambda *x: sharded(local)(*x).sum()))

    def calls(**options):
        jaxcomm.finalize()
        batch = layout.reorder(jnp.ones((1, 16, 1, 4)))
        jax.block_until_ready(gradient(**options)(*batch))
        (found,) = jaxcomm.communicators()
        return found.stats()["calls"]

    # Three sends forward, four backward: of blocks and gradients, one behind the other.
    # All layers have the same positions, which XLA compares once.
    once = {"check_positions": 1, "permute": 3 * (3 + 4)}
    assert calls(policy=save_attention) == once
    assert calls()["permute"] == 3 * (3 + 3 + 4)
