"""What a hop computes and rounds; what it gives is in ``test_options.py``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from split import inputs

from jaxcomm.attention.kernels.kernel import Hop, Saved
from jaxcomm.attention.kernels.xla import kernel, tiles
from jaxcomm.attention.kernels.xla.kernel import Xla
from jaxcomm.attention.mask import Coordinates, Mask


@pytest.fixture(params=[kernel.over_visible, kernel.over_all])
def small_tiles(request, monkeypatch):
    """Tiles of at most 4 queries and 4 keys, so that little shapes have many."""
    monkeypatch.setattr(tiles, "_FEWEST_QUERIES", 4)
    return Xla(kernel.TileLoop(4, request.param))


def _both(kernel, query, key, value, grads, is_causal=False):
    """Run forward, then backward with the lse of this one block."""
    lengths = query.shape[1], key.shape[1]

    @jax.jit
    def run(query, key, value, grads):
        hop = Hop(
            query.shape[3] ** -0.5,
            Mask(None, 0 if is_causal else None, *lengths),
            *(query, key, value),
            *(Coordinates(jnp.arange(length)) for length in lengths),
            query_segments=lengths[:1],
            key_segments=lengths[1:],
        )
        out, lse = kernel.forward(hop)
        delta = (grads[0].astype(out.dtype) * out).sum(-1) - grads[1]
        found = kernel.backward(hop, Saved(grads[0], out, lse, delta))
        return out, lse, *found[:3]

    return run(query, key, value, grads)


def test_skipped_tiles_are_not_computed(small_tiles):
    query, key, value, grads = inputs((1, 8, 1, 8))
    # Were the tile above the diagonal computed, 0 times NaN would spread.
    poison = jnp.where(jnp.arange(8) < 4, 0, jnp.nan)[None, :, None, None]
    found = _both(
        small_tiles, query, key + poison, value + poison, grads, is_causal=True
    )
    out, lse, *gradients = found
    assert jnp.isfinite(out[:, :4]).all()
    assert jnp.isfinite(lse[:, :4]).all()
    assert jnp.isfinite(gradients[0][:, :4]).all()
    assert jnp.isnan(out[:, 4:]).any()


@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (1, 0, 2, 8)])
def test_no_tokens_and_no_batch_give_empty_results(shape):
    query, key, value, grads = inputs(shape)
    found = _both(Xla(), query, key, value, grads)
    assert [x.shape for x in found] == [shape, shape[:3], shape, shape, shape]


def test_a_hop_in_bfloat16_is_a_float32_hop_of_the_same_numbers(small_tiles):
    """No partial result is rounded between tiles, forward or in dK and dV."""
    *arrays, grads = inputs((1, 16, 2, 8), dtype=jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in arrays]
    found = _both(small_tiles, *arrays, grads)
    expected = _both(small_tiles, *wide, (grads[0].astype(jnp.float32), grads[1]))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
