"""The ring by itself: sizes and schedules, few tokens, large numbers, dtypes."""

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split
from dense import Options

from jaxcomm.attention.schedules import Schedule

CAUSAL = Options(is_causal=True)


class Backwards(Schedule):
    """From outside of the package: contiguous slices, the last rank first."""

    name = "backwards"

    def positions(self, rank, size, length):
        return (size - 1 - rank) * length + np.arange(length, dtype=np.int32)


@pytest.mark.parametrize(
    ("tokens", "size", "schedule", "options"),
    [
        # 31 tokens divide by none of the sizes.
        (31, 3, "striped", CAUSAL),
        (31, 8, "zigzag", CAUSAL),
        # Ranks with padding only, and tiles whose only visible pair is on the diagonal.
        (3, 8, "zigzag", CAUSAL),
        (4, 4, "contiguous", CAUSAL),
        (8, 4, "striped", CAUSAL),
        # Of 8 ranks some see a block; it, and its gradients, go to those alone.
        (32, 8, "contiguous", Options(window=(9, 4))),
        (32, 8, "zigzag", Options(window=(4, 4))),
        (32, 4, Backwards(), CAUSAL),
    ],
)
def test_it_equals_dense_with_gradients(tokens, size, schedule, options):
    *arrays, grads = split.inputs((2, tokens, 4, 8), (2, tokens, 2, 8))
    how = {"size": size, "schedule": schedule}
    split.compare(*arrays, options, grads, 2e-5, **how)
    if isinstance(schedule, Backwards):
        # It stops early.
        options = Options(is_causal=True, window=(5, 0))
        split.compare(*arrays, options, grads, strategy="halo", **how)


def test_tiles_of_their_real_size_equal_dense():
    split.compare(*split.inputs((1, 1100, 1, 8))[:3], CAUSAL, size=3)


def test_scores_far_apart_neither_overflow_nor_lose_rows():
    query, *others, grads = split.inputs((1, 32, 2, 8))
    found = split.attend(100 * query, *others, CAUSAL, grads, size=4)
    assert all(jnp.isfinite(x).all() for x in found[:5])
    expected = dense.attention(100 * query, *others, CAUSAL)
    # Scores reach hundreds, where float32 resolves 3e-5.
    np.testing.assert_allclose(found.out, expected.out, atol=1e-3)


def test_float64_is_summed_in_float64():
    with jax.enable_x64(True):
        *arrays, grads = split.inputs((1, 24, 2, 8), dtype=jnp.float64)
        found, _ = split.compare(*arrays, CAUSAL, grads, 1e-13, size=4)
    assert {x.dtype for x in found[:5]} == {jnp.dtype("float64")}
