import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.attention.kernels import tile_loops, tiling
from jaxcomm.attention.kernels.operands import HopConfig, Operands
from jaxcomm.attention.kernels.xla import hop_backward, hop_forward
from jaxcomm.attention.mask import Mask, Tokens


@pytest.fixture(params=[tile_loops.over_visible, tile_loops.over_all])
def small_tiles(request, monkeypatch):
    """Tiles of at most 4 queries and 4 keys, so that little shapes have many."""
    loop = tile_loops.TileLoop(4, request.param)
    monkeypatch.setattr(tile_loops, "ON_CPU", loop)
    monkeypatch.setattr(tiling, "_FEWEST_QUERIES", 4)


def _config(query, key, is_causal=False, **lengths):
    tokens = {"query_length": query.shape[1], "key_length": key.shape[1]} | lengths
    return HopConfig(
        scale=query.shape[3] ** -0.5,
        mask=Mask(None, 0 if is_causal else None, **tokens),
        query_segments=(query.shape[1],),
        key_segments=(key.shape[1],),
    )


def _both(query, key, value, grads, config, positions=None):
    """Run forward, then backward with the lse of this one block."""
    if positions is None:
        positions = [jnp.arange(x.shape[1], dtype=jnp.int32) for x in (query, key)]

    @jax.jit
    def run(query, key, value, positions, grads):
        operands = Operands(query, key, value, *map(Tokens, positions))
        out, lse = hop_forward(operands, config=config)
        delta = (grads[0].astype(out.dtype) * out).sum(-1) - grads[1]
        found = hop_backward(operands, grads[0], lse, delta, config=config)
        return out, lse, *found[:3]

    return run(query, key, value, positions, grads)


@pytest.mark.parametrize(("is_causal", "group"), [(False, 1), (True, 4)])
@pytest.mark.usefixtures("small_tiles")
def test_one_block_is_dense_attention(inputs, dense, assert_close, is_causal, group):
    query, key, value, grads = inputs((2, 11, 8, 8), (2, 11, 8 // group, 8))
    found = _both(query, key, value, grads, _config(query, key, is_causal))
    expected = dense(query, key, value, is_causal=is_causal, grads=grads)
    assert_close(found, expected, 1e-5)


@pytest.mark.usefixtures("small_tiles")
def test_segments_and_shuffled_positions_give_the_same(inputs, dense, assert_close):
    query, key, value, grads = inputs((1, 13, 2, 8))
    config = _config(query, key, is_causal=True)
    config = dataclasses.replace(config, query_segments=(7, 6), key_segments=(3, 10))
    order = np.random.default_rng(0).permutation(13).astype(np.int32)
    shuffled = [x[:, order] for x in (query, key, value)]
    shuffled_grads = tuple(x[:, order] for x in grads)
    held = jnp.asarray(order)
    found = _both(*shuffled, shuffled_grads, config, (held, held))
    back = np.argsort(order)
    expected = dense(query, key, value, is_causal=True, grads=grads)
    assert_close([x[:, back] for x in found], expected, 1e-5)


@pytest.mark.usefixtures("small_tiles")
def test_skipped_tiles_are_not_computed(inputs):
    query, key, value, grads = inputs((1, 8, 1, 8))
    # Were the tile above the diagonal computed, 0 times NaN would spread.
    poison = jnp.where(jnp.arange(8) < 4, 0, jnp.nan)[None, :, None, None]
    config = _config(query, key, is_causal=True)
    out, lse, *gradients = _both(query, key + poison, value + poison, grads, config)
    assert jnp.isfinite(out[:, :4]).all()
    assert jnp.isfinite(lse[:, :4]).all()
    assert jnp.isfinite(gradients[0][:, :4]).all()
    assert jnp.isnan(out[:, 4:]).any()


@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (1, 0, 2, 8)])
def test_no_tokens_and_no_batch_give_empty_results(inputs, shape):
    query, key, value, grads = inputs(shape)
    found = _both(query, key, value, grads, _config(query, key))
    assert [x.shape for x in found] == [shape, shape[:3], shape, shape, shape]


@pytest.mark.usefixtures("small_tiles")
def test_a_hop_in_bfloat16_is_a_float32_hop_of_the_same_numbers(inputs):
    """No partial result is rounded between tiles, forward or in dK and dV."""
    *arrays, grads = inputs((1, 32, 2, 8), dtype=jnp.bfloat16)
    config = _config(*arrays[:2])
    wide = [x.astype(jnp.float32) for x in arrays]
    found = _both(*arrays, grads, config)
    expected = _both(*wide, (grads[0].astype(jnp.float32), grads[1]), config)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
