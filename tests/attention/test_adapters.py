"""Layers of other libraries, and jax.checkpoint, over a split sequence."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm.attention import attention_fn, equinox_attention, save_attention

LENGTH, WIDTH = 24, 16
LAYOUT = jaxcomm.Layout("zigzag", 4, LENGTH)
SPLIT = jax.P(None, "context")


def _x():
    x = np.random.default_rng(0).standard_normal((2, LENGTH, WIDTH))
    return x.astype(np.float32)


def _over_ranks(function, mesh, *trees):
    """Apply a function of one rank's tokens and positions to the whole sequence."""
    whole = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(SPLIT, SPLIT, *[jax.P()] * len(trees)),
        out_specs=SPLIT,
    )
    x, positions = LAYOUT.reorder(_x())
    return LAYOUT.restore(np.asarray(jax.jit(whole)(x, positions, *trees)), positions)


def _attend(positions):
    return attention_fn("context", LAYOUT, positions=positions, is_causal=True)


def test_the_maker_or_the_layer_says_that_it_is_causal(mesh_of):
    """Whoever says so alone is heard; flax passes it where it makes no mask."""

    def attended(by_maker, by_layer):
        def local(x, positions):
            attend = attention_fn(
                "context", LAYOUT, positions=positions, is_causal=by_maker
            )
            x = x[:, :, None]
            return attend(x, x, x, is_causal=by_layer)[:, :, 0]

        return _over_ranks(local, mesh_of(4))

    causal, all_seen = attended(True, True), attended(False, False)
    assert not np.allclose(causal, all_seen, atol=1e-2)
    np.testing.assert_array_equal(attended(True, False), causal)
    np.testing.assert_array_equal(attended(False, True), causal)


def test_flax_nnx_attends_as_on_one_device(mesh_of):
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        """Two layers, as deep in a model as those of users."""

        def __init__(self):
            self.layers = nnx.List(
                nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=nnx.Rngs(seed))
                for seed in (0, 1)
            )

        def __call__(self, x, **options):
            for layer in self.layers:
                x = x + layer(x, **options)
            return x

    graph, state = nnx.split(Model())
    expected = nnx.merge(graph, state)(_x(), is_causal=True)

    def local(x, positions, state):
        model = nnx.merge(graph, state)
        model.set_attributes(attention_fn=_attend(positions))
        return model(x)

    found = _over_ranks(local, mesh_of(4), state)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_flax_linen_attends_as_on_one_device(mesh_of):
    linen = pytest.importorskip("flax.linen")
    layer = linen.MultiHeadDotProductAttention(4)
    params = layer.init(jax.random.key(0), _x())
    mask = linen.make_causal_mask(_x()[..., 0])
    expected = layer.apply(params, _x(), mask=mask)

    def local(x, positions, params):
        return layer.clone(attention_fn=_attend(positions)).apply(params, x)

    found = _over_ranks(local, mesh_of(4), params)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("mask", [None, "distance"])
def test_equinox_attends_as_on_one_device(mesh_of, mask):
    equinox = pytest.importorskip("equinox")
    layer = equinox.nn.MultiheadAttention(4, WIDTH, key=jax.random.key(0))
    rotate = equinox.nn.RotaryPositionalEmbedding(WIDTH // 4)
    at = jnp.arange(LENGTH)
    causal = at[:, None] >= at
    near = jnp.ones_like(causal) if mask is None else abs(at[:, None] - at) < 7

    def heads(positions):
        """Rotate by the positions of the tokens."""

        def turn(x):
            table = jax.vmap(rotate, 1, 1)(jnp.ones((LENGTH, *x.shape[1:])))
            return x * table[jnp.maximum(positions, 0)]

        return lambda query, key, value: (turn(query), turn(key), value)

    def whole(x):
        return layer(x, x, x, causal & near, process_heads=heads(at))

    arrays, static = equinox.partition(layer, equinox.is_array)

    def local(x, positions, arrays):
        layer = equinox.combine(arrays, static)

        def one(x, positions):
            attend = equinox_attention(layer, _attend(positions))
            rows = None if mask is None else near[jnp.maximum(positions, 0)]
            return attend(x, x, x, rows, process_heads=heads(positions))

        return jax.vmap(one)(x, positions)

    found = _over_ranks(local, mesh_of(4), arrays)
    np.testing.assert_allclose(found, jax.vmap(whole)(_x()), atol=1e-5)


def test_dropout_of_equinox_is_that_of_ring_attention(mesh_of):
    equinox = pytest.importorskip("equinox")
    layer = equinox.nn.MultiheadAttention(
        4, WIDTH, dropout_p=0.5, key=jax.random.key(0)
    )

    def out(key, inference):
        def local(x, positions):
            def one(x, positions, key):
                attend = equinox_attention(layer, _attend(positions))
                return attend(x, x, x, key=key, inference=inference)

            return jax.vmap(one)(x, positions, jax.random.split(jax.random.key(key), 2))

        return _over_ranks(local, mesh_of(4))

    dropped = out(0, None)
    assert not np.allclose(dropped, out(1, None))
    np.testing.assert_array_equal(dropped, out(0, None))
    np.testing.assert_array_equal(out(0, True), out(1, True))


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


def test_a_rematerialised_layer_runs_the_forward_ring_once(mesh_of):
    """Layers in a scan, with the check of the positions, as users have them."""
    layout = jaxcomm.Layout("zigzag", 4, 16)

    def gradient(**options):
        def local(x, positions):
            def layer(x, _):
                y = jnp.sin(x)
                return y + jaxcomm.ring_attention(
                    y, y, y, axis_name="context", layout=layout, positions=positions,
                    is_causal=True,
                ), None  # fmt: skip

            return jax.lax.scan(jax.checkpoint(layer, **options), x, length=3)[0]

        whole = jax.shard_map(local, mesh=mesh_of(4), in_specs=SPLIT, out_specs=SPLIT)
        return jax.jit(jax.grad(lambda *x: whole(*x).sum()))

    def calls(**options):
        jaxcomm.finalize()
        batch = layout.reorder(jnp.ones((1, 16, 2, 4)))
        jax.block_until_ready(gradient(**options)(*batch))
        (found,) = jaxcomm.communicators()
        return found.stats()["calls"]

    # Three sends forward, four backward: of blocks and gradients, one behind the other.
    # All layers have the same positions, which XLA compares once.
    once = {"check_positions": 1, "permute": 3 * (3 + 4)}
    assert calls(policy=save_attention) == once
    assert calls(policy=jax.checkpoint_policies.everything_saveable) == once
    assert calls()["permute"] == 3 * (3 + 3 + 4)
