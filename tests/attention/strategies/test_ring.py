"""The ring by itself: sizes and schedules, few tokens, large numbers, dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.mark.parametrize(
    ("tokens", "size", "schedule"),
    [
        # 31 tokens divide by none of the sizes.
        (31, 2, "contiguous"),
        (31, 3, "striped"),
        (31, 8, "zigzag"),
        # Ranks with padding only, and tiles whose only visible pair is on the diagonal.
        (3, 8, "zigzag"),
        (4, 4, "contiguous"),
        (8, 4, "striped"),
        (12, 4, "zigzag"),
    ],
)
def test_causal_equals_dense_with_gradients(
    ring, dense, inputs, assert_close, tokens, size, schedule
):
    query, key, value, grads = inputs((2, tokens, 4, 16), (2, tokens, 2, 16))
    options = {"is_causal": True, "grads": grads}
    found = ring(query, key, value, size=size, schedule=schedule, **options)
    assert_close(found, dense(query, key, value, **options), 1e-5)


def test_tiles_of_their_real_size_equal_dense(ring, dense, inputs, assert_close):
    query, key, value, _ = inputs((1, 1100, 1, 8))
    found = ring(query, key, value, size=3, is_causal=True)
    assert_close(found, dense(query, key, value, is_causal=True), 1e-5)


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
def test_blocks_pass_over_ranks_that_see_nothing_of_them(
    ring, dense, inputs, assert_close, schedule, left
):
    """Of 8 ranks some see a block; it, and its gradients, go to those alone."""
    *arrays, grads = inputs((1, 32, 2, 8))
    options = {"window": (left, 4), "grads": grads}
    found = ring(*arrays, size=8, schedule=schedule, strategy="ring", **options)
    assert_close(found, dense(*arrays, **options), 2e-5)
