"""What a hop computes and rounds; what it gives is in ``test_options.py``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from split import inputs

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


def _both(query, key, value, grads, is_causal=False):
    """Run forward, then backward with the lse of this one block."""
    lengths = query.shape[1], key.shape[1]
    config = HopConfig(
        scale=query.shape[3] ** -0.5,
        mask=Mask(None, 0 if is_causal else None, *lengths),
        query_segments=lengths[:1],
        key_segments=lengths[1:],
    )

    @jax.jit
    def run(query, key, value, grads):
        at = (Tokens(jnp.arange(length, dtype=jnp.int32)) for length in lengths)
        operands = Operands(query, key, value, *at)
        out, lse = hop_forward(operands, config=config)
        delta = (grads[0].astype(out.dtype) * out).sum(-1) - grads[1]
        found = hop_backward(operands, grads[0], lse, delta, config=config)
        return out, lse, *found[:3]

    return run(query, key, value, grads)


@pytest.mark.usefixtures("small_tiles")
def test_skipped_tiles_are_not_computed():
    query, key, value, grads = inputs((1, 8, 1, 8))
    # Were the tile above the diagonal computed, 0 times NaN would spread.
    poison = jnp.where(jnp.arange(8) < 4, 0, jnp.nan)[None, :, None, None]
    found = _both(query, key + poison, value + poison, grads, is_causal=True)
    out, lse, *gradients = found
    assert jnp.isfinite(out[:, :4]).all()
    assert jnp.isfinite(lse[:, :4]).all()
    assert jnp.isfinite(gradients[0][:, :4]).all()
    assert jnp.isnan(out[:, 4:]).any()


@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (1, 0, 2, 8)])
def test_no_tokens_and_no_batch_give_empty_results(shape):
    query, key, value, grads = inputs(shape)
    found = _both(query, key, value, grads)
    assert [x.shape for x in found] == [shape, shape[:3], shape, shape, shape]


@pytest.mark.usefixtures("small_tiles")
def test_a_hop_in_bfloat16_is_a_float32_hop_of_the_same_numbers():
    """No partial result is rounded between tiles, forward or in dK and dV."""
    *arrays, grads = inputs((1, 16, 2, 8), dtype=jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in arrays]
    found = _both(*arrays, grads)
    expected = _both(*wide, (grads[0].astype(jnp.float32), grads[1]))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
