"""Layers of other libraries, and jax.checkpoint, over a split sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from split import SPLIT, sharded

import jaxcomm
from jaxcomm.attention import attention_fn, save_attention

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


def test_a_rematerialised_layer_runs_the_forward_ring_once():
    """Layers in a scan, with the check of the positions, as users have them."""
    layout = jaxcomm.Layout("zigzag", 4, 16)

    def gradient(**options):
        def local(x, tokens):
            def layer(x, _):
                y = jnp.sin(x)
                return y + jaxcomm.ring_attention(
                    y, y, y, "context", tokens, is_causal=True, strategy="ring"
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
