"""Layers of other libraries, and jax.checkpoint, over a split sequence."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split

import jaxcomm
from jaxcomm.attention import attention_fn, save_attention

LENGTH, WIDTH = 24, 16
LAYOUT = jaxcomm.Layout("zigzag", 4, LENGTH)
SPLIT = jax.P(None, "context")


def _x():
    x = np.random.default_rng(0).standard_normal((2, LENGTH, WIDTH))
    return x.astype(np.float32)


def _over_ranks(function, mesh, *trees):
    """Apply a function of one rank's tokens to the whole sequence."""
    whole = jax.shard_map(
        function, mesh=mesh, in_specs=(SPLIT, *[jax.P()] * len(trees)), out_specs=SPLIT
    )
    return LAYOUT.restore(np.asarray(jax.jit(whole)(LAYOUT.reorder(_x()), *trees)))


def test_flax_nnx_attends_as_on_one_device(mesh_of):
    nnx = pytest.importorskip("flax.nnx")

    def layer(attend):
        return nnx.MultiHeadAttention(
            4, WIDTH, decode=False, rngs=nnx.Rngs(0), **attend
        )

    graph, state = nnx.split(layer({}))
    expected = nnx.merge(graph, state)(_x(), is_causal=True)
    attend = attention_fn("context", LAYOUT, is_causal=True)
    graph, _ = nnx.split(layer({"attention_fn": attend}))
    found = _over_ranks(lambda x, s: nnx.merge(graph, s)(x), mesh_of(4), state)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_flax_linen_attends_as_on_one_device(mesh_of):
    linen = pytest.importorskip("flax.linen")
    plain = linen.MultiHeadDotProductAttention(4)
    params = plain.init(jax.random.key(0), _x())
    mask = linen.make_causal_mask(_x()[..., 0])
    expected = plain.apply(params, _x(), mask=mask)
    ours = linen.MultiHeadDotProductAttention(
        4, attention_fn=attention_fn("context", LAYOUT, is_causal=True)
    )
    found = _over_ranks(lambda x, p: ours.apply(p, x), mesh_of(4), params)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_layer_without_a_batch_attends_under_vmap(mesh_of):
    """As layers of equinox do, which know one sequence."""

    def one(x):
        heads = x.reshape(x.shape[0], 4, 4)
        return jaxcomm.ring_attention(
            heads, heads, heads, axis_name="context", layout=LAYOUT, is_causal=True
        ).reshape(x.shape)

    found = _over_ranks(jax.vmap(one), mesh_of(4))
    heads = _x().reshape(2, LENGTH, 4, 4)
    expected = jax.nn.dot_product_attention(heads, heads, heads, is_causal=True)
    np.testing.assert_allclose(found, expected.reshape(_x().shape), atol=1e-5)


def test_what_flax_may_ask_for_and_cannot_have_is_refused():
    attend = attention_fn("context", LAYOUT)
    x = jnp.ones((1, 6, 4, 4))
    for options, text in (
        ({"precision": "highest"}, "precision is not possible"),
        ({"module": object()}, "sow_weights is not possible"),
        ({"dropout_rate": 0.5}, "broadcast_dropout is not possible. Pass False"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            attend(x, x, x, **options)


def test_a_rematerialised_layer_does_not_send_the_ring_twice(mesh_of):
    def layer(x):
        y = jnp.sin(x)
        return y + split.on_ranks(y, y, y, schedule="zigzag", is_causal=True)

    def sends(**options):
        whole = jax.shard_map(
            jax.checkpoint(layer, **options),
            mesh=mesh_of(4),
            in_specs=SPLIT,
            out_specs=SPLIT,
        )
        x = jnp.ones((1, 16, 2, 4))
        text = str(jax.make_jaxpr(jax.grad(lambda x: whole(x).sum()))(x))
        return text.count("jaxcomm_permute_start[")

    # One start in the loop forward; three and the one in the loop backward.
    assert sends(policy=save_attention) == sends(
        policy=jax.checkpoint_policies.everything_saveable
    )
    assert sends() == sends(policy=save_attention) + 1
