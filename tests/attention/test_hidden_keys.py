"""``mask=`` as an array, and a bias far below 0 that means the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split

import jaxcomm
from jaxcomm.attention.strategies.usp import Usp

SHAPE = (2, 12, 4, 8)
LENGTH = SHAPE[1]
# Rows 4 and 5 see nothing.
SEEN = np.random.default_rng(5).random((1, 1, LENGTH, LENGTH)) < 0.6
SEEN[..., 4:6, :] = False


def results(attend, *arrays):
    """Return the output, and the gradients of query, key, value and bias."""

    @jax.jit
    def both(*arrays):
        *given, grad = arrays
        out, pull = jax.vjp(attend, *given)
        return out, *pull(grad)

    return [np.asarray(x) for x in both(*map(jnp.asarray, arrays))]


def dense(seen, cap=None, window=None):
    """Return attention as ring_attention's docstring says: the mask comes last."""
    row, column = np.ogrid[:LENGTH, :LENGTH]
    if window is not None:
        seen = seen & (row - column <= window[0]) & (column - row <= window[1])

    def attend(query, key, value, bias):
        scores = jnp.einsum("btnd,bsnd->bnts", query, key) / np.sqrt(SHAPE[3]) + bias
        scores = scores if cap is None else cap * jnp.tanh(scores / cap)
        weights = jnp.where(seen, jnp.exp(scores), 0)
        total = weights.sum(-1, keepdims=True)
        weights = weights / jnp.where(total == 0, 1, total)
        return jnp.einsum("bnts,bsnd->btnd", weights, value)

    return attend


def ours(size, **options):
    def attend(*block_and_bias):
        return jaxcomm.dot_product_attention(
            *block_and_bias, axis_name="context", mesh=split.ring_over(size), **options
        )

    return attend


@pytest.fixture
def arrays():
    """Query, key, value and a gradient, in float64."""
    with jax.enable_x64(True):
        yield np.random.default_rng(6).normal(size=(4, *SHAPE))


@pytest.mark.parametrize(
    ("strategy", "size"),
    [("ring", 1), ("ring", 4), ("all_gather", 2), ("ulysses", 4), (Usp(2), 4),
     ("halo", 3)],
)  # fmt: skip
def test_a_mask_hides_keys_whatever_else_changes_the_scores(arrays, strategy, size):
    random = np.random.default_rng(3)
    bias = random.normal(size=(1, 4, LENGTH, LENGTH))
    mask = random.random((2, 1, LENGTH, LENGTH)) < 0.6
    mask[1, :, 5] = False  # A row that sees nothing.
    window = (4, 2) if strategy == "halo" else None
    options = {"mask": mask, "strategy": strategy, "local_window_size": window}
    *block, grad = arrays
    found = results(ours(size, logits_soft_cap=1.5, **options), *block, bias, grad)
    expected = results(dense(mask, 1.5, window), *block, bias, grad)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)
    assert (found[0][1, 5] == 0).all()


@pytest.mark.parametrize(
    ("low", "cap", "strategy"),
    [
        (-60_000, None, "ring"),
        (float(np.finfo(np.float32).min), None, "ulysses"),
        # No cap shows what it hides.
        (-1e9, 2.0, "ring"),
    ],
)
def test_a_low_bias_hides_keys_as_a_mask_does(low, cap, strategy, arrays):
    *block, grad = arrays.astype(np.float32)
    bias = np.where(SEEN, 0, low).astype(np.float32)
    attend = ours(2, strategy=strategy, logits_soft_cap=cap)
    found = results(attend, *block, bias, grad)
    expected = results(dense(SEEN, cap), *arrays[:3], 0.0 * SEEN, arrays[3])
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    assert not found[0][:, 4:6].any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_least_number_of_a_short_dtype_hides_keys(dtype, arrays):
    *block, grad = arrays.astype(np.float32)
    bias = jnp.where(SEEN, 0, jnp.finfo(dtype).min).astype(dtype)
    found = results(ours(4, strategy="ring"), *block, bias, grad)
    expected = results(dense(SEEN), *arrays[:3], 0.0 * SEEN, arrays[3])
    for x, y in zip(found[:4], expected[:4], strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_a_large_one_that_is_above_is_added(arrays):
    """As in jax.nn, which has the same digits."""
    block = [jnp.asarray(x, "float32") for x in arrays[:3]]
    rows = np.random.default_rng(7).normal(size=(1, 1, LENGTH, LENGTH))
    bias = jnp.asarray(rows - 1000, "float32")
    out = ours(2)(*block, bias)
    expected = jax.nn.dot_product_attention(*block, bias)
    np.testing.assert_allclose(out, expected, atol=1e-3)
    assert np.abs(out).min() > 0
