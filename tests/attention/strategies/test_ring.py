import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import Options, attention
from split import assert_close, attend, random_inputs

from jaxcomm.attention.kernels import tile_loops, tiling
from jaxcomm.attention.schedules.registry import SCHEDULES

every_schedule = pytest.mark.parametrize("schedule", sorted(SCHEDULES))


@pytest.fixture
def small_tiles(monkeypatch):
    loop = tile_loops.TileLoop(8, tile_loops.over_visible)
    monkeypatch.setattr(tile_loops, "ON_CPU", loop)
    monkeypatch.setattr(tiling, "_FEWEST_QUERIES", 4)


@every_schedule
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_causal_equals_dense_with_gradients(
    ring, dense, inputs, assert_close, schedule, size
):
    # 31 tokens divide by none of the sizes but one.
    query, key, value, grads = inputs((2, 31, 4, 16), (2, 31, 2, 16))
    options = {"is_causal": True, "grads": grads}
    found = ring(query, key, value, size=size, schedule=schedule, **options)
    assert_close(found, dense(query, key, value, **options), 1e-5)


@every_schedule
@pytest.mark.parametrize("size", [1, 3, 8])
def test_without_a_mask_equals_dense(ring, dense, inputs, assert_close, schedule, size):
    query, key, value, _ = inputs((2, 31, 4, 16), (2, 31, 2, 16))
    found = ring(query, key, value, size=size, schedule=schedule)
    assert_close(found, dense(query, key, value), 1e-5)


@every_schedule
@pytest.mark.usefixtures("small_tiles")
def test_many_tiles_per_block_equal_dense(ring, dense, inputs, assert_close, schedule):
    query, key, value, grads = inputs((1, 250, 4, 8), (1, 250, 2, 8))
    options = {"is_causal": True, "grads": grads}
    found = ring(query, key, value, size=4, schedule=schedule, **options)
    assert_close(found, dense(query, key, value, **options), 1e-5)


# TransformerEngine's ring test, with a quarter of its heads.
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("size", "group"), [(2, 4), (4, 1), (8, 4)])
def test_transformer_engine_shapes_in_bfloat16(
    ring, dense, inputs, assert_close, is_causal, size, group
):
    tokens = 128 * 2 * size
    query, key, value, _ = inputs(
        (2, tokens, 4, 64), (2, tokens, 4 // group, 64), jnp.bfloat16
    )
    found = ring(query, key, value, size=size, is_causal=is_causal)
    assert found.out.dtype == jnp.bfloat16
    # eps ** (2 / 3) of bfloat16, as there.
    assert_close(found, dense(query, key, value, is_causal=is_causal), 0.0394)


# PyTorch's context parallel test: 8 heads, 64 tokens a rank, head size 32; its 1e-8 and
# 2e-6 compare two float32 paths, here the oracle is float64.
@pytest.mark.parametrize("is_causal", [False, True])
def test_torch_context_parallel_shape(ring, dense, inputs, assert_close, is_causal):
    query, key, value, grads = inputs((1, 64 * 8, 8, 32))
    options = {"is_causal": is_causal, "grads": grads}
    found = ring(query, key, value, size=8, **options)
    assert_close(found, dense(query, key, value, **options), 1e-5)


@pytest.mark.parametrize("lengths", [(24, 16), (64, 512), (2048, 128), (5, 31)])
def test_cross_attention_of_unequal_lengths(ring, dense, inputs, assert_close, lengths):
    queries, keys = lengths
    query, key, value, grads = inputs((1, queries, 2, 8), (1, keys, 2, 8))
    found = ring(query, key, value, size=4, grads=grads)
    assert_close(found, dense(query, key, value, grads=grads), 1e-5)


@pytest.mark.parametrize("group", [1, 4, 8])
def test_key_heads_are_shared_by_groups_of_query_heads(
    ring, dense, inputs, assert_close, group
):
    query, key, value, grads = inputs((1, 40, 8, 8), (1, 40, 8 // group, 8))
    options = {"is_causal": True, "grads": grads}
    found = ring(query, key, value, size=4, **options)
    assert_close(found, dense(query, key, value, **options), 1e-5)


# MagiAttention's lengths.
@pytest.mark.parametrize(("length", "size"), [(10000, 3), (11021, 8)])
def test_long_sequences_that_do_not_divide(
    ring, dense, inputs, assert_close, length, size
):
    query, key, value, _ = inputs((1, length, 1, 8))
    found = ring(query, key, value, size=size, is_causal=True)
    assert_close(found, dense(query, key, value, is_causal=True), 1e-5)


def test_fewer_tokens_than_ranks_leave_ranks_with_padding_only(
    ring, dense, inputs, assert_close
):
    query, key, value, grads = inputs((1, 3, 2, 8))
    options = {"is_causal": True, "grads": grads}
    found = ring(query, key, value, size=8, **options)
    assert_close(found, dense(query, key, value, **options), 1e-5)


def test_the_error_in_bfloat16_does_not_grow_with_the_ring(ring, dense, inputs):
    query, key, value, grads = inputs((1, 1024, 2, 32), dtype=jnp.bfloat16)
    expected = dense(query, key, value, grads=grads)

    def errors(size):
        found = ring(query, key, value, size=size, grads=grads)
        return {
            name: float(np.sqrt(np.mean((np.asarray(a, np.float64) - b) ** 2)))
            for name, a, b in zip(found._fields[:5], found, expected, strict=False)
        }

    of_two, of_eight = errors(2), errors(8)
    ratios = {name: of_eight[name] / of_two[name] for name in of_two}
    # The residual is float32 already; its error is all rounding noise.
    ratios.pop("lse")
    assert max(ratios.values()) <= 1.2, ratios


def test_scores_far_apart_neither_overflow_nor_lose_rows(ring, dense, inputs):
    query, key, value, grads = inputs((1, 32, 2, 8))
    found = ring(100 * query, key, value, size=4, is_causal=True, grads=grads)
    assert all(jnp.isfinite(x).all() for x in found[:5])
    expected = dense(100 * query, key, value, is_causal=True)
    # Scores reach hundreds, where float32 resolves 3e-5.
    np.testing.assert_allclose(found.out, expected.out, atol=1e-3)


def test_float64_is_summed_in_float64(ring, dense, inputs, assert_close):
    with jax.enable_x64(True):
        query, key, value, grads = inputs((1, 24, 2, 8), dtype=jnp.float64)
        options = {"is_causal": True, "grads": (grads[0], grads[1].astype(float))}
        found = ring(query, key, value, size=4, **options)
        assert {x.dtype for x in found[:5]} == {jnp.dtype("float64")}
        assert_close(found, dense(query, key, value, **options), 1e-13)


@pytest.mark.parametrize(("schedule", "left"), [("contiguous", 9), ("zigzag", 4)])
def test_blocks_pass_over_ranks_that_see_nothing_of_them(schedule, left):
    """Of 8 ranks some see a block; it, and its gradients, go to those alone."""
    *arrays, grads = random_inputs((1, 32, 2, 8), (1, 32, 2, 8))
    options = Options(window=(left, 4))
    found = attend(*arrays, options, grads, size=8, schedule=schedule, strategy="ring")
    assert_close(found, attention(*arrays, options, grads), 2e-5)
