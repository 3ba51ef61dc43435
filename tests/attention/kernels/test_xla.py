"""What a hop computes and rounds; what it gives is in ``test_options.py``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hops import Case, both, hop_of, run

from jaxcomm.attention.kernels.xla import kernel, tiles
from jaxcomm.attention.kernels.xla.kernel import XLA, Xla
from jaxcomm.attention.mask import Coordinates


@pytest.fixture(params=[kernel.over_visible, kernel.over_all])
def small_tiles(request, monkeypatch):
    """Tiles of at most 4 queries and 4 keys, so that little shapes have many."""
    monkeypatch.setattr(tiles, "_FEWEST_QUERIES", 4)
    return Xla(4, request.param)


def test_skipped_tiles_are_not_computed(small_tiles):
    hop, grad = hop_of(Case(queries=8, keys=8, right=0, dtype="float32"))
    # Were the tile above the diagonal computed, 0 times NaN would spread.
    poison = jnp.where(jnp.arange(8) < 4, 0, jnp.nan)[None, :, None, None]
    hop = hop.replace(
        kernels=(small_tiles,),
        key=hop.key + poison,
        value=hop.value + poison,
    ).with_pairs(queries=Coordinates(jnp.arange(8)))
    out, lse, grads = both(hop, grad)
    for x in (out, lse, grads.query):
        assert jnp.isfinite(x[:, :4]).all()
    assert jnp.isnan(out[:, 4:]).any()


@pytest.mark.parametrize("empty", [{"batch": 0}, {"keys": 0}])
def test_no_tokens_and_no_batch_give_empty_results(empty):
    case = Case(**empty)
    hop, _ = hop_of(case)
    out, lse, grads = run(XLA, case)
    assert lse.shape == hop.query.shape[:3]
    given = hop.query, hop.query, hop.key, hop.value
    assert [x.shape for x in (out, *grads[:3])] == [x.shape for x in given]


def test_a_hop_in_bfloat16_is_a_float32_hop_of_the_same_numbers(small_tiles):
    """No partial result is rounded between tiles, forward or in dK and dV."""
    found, expected = (
        jax.tree.leaves(run(small_tiles, Case(), dtype)) for dtype in (None, "float32")
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
