"""A bias far below 0, against the mask that is meant by it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split

import jaxcomm

LENGTH = 12
# Rows 4 and 5 see nothing.
SEEN = np.random.default_rng(5).random((1, 1, LENGTH, LENGTH)) < 0.6
SEEN[..., 4:6, :] = False


@pytest.fixture
def inputs():
    random = np.random.default_rng(6)
    return random.normal(size=(4, 2, LENGTH, 2, 8)).astype(np.float32)


def results(inputs, bias, size, **options):
    """Return the output, and the gradients of query, key, value and bias."""
    *block, grad = map(jnp.asarray, inputs)

    def attend(*block_and_bias):
        return jaxcomm.dot_product_attention(
            *block_and_bias, axis_name="context", mesh=split.ring_over(size), **options
        )

    @jax.jit
    def both(*given):
        out, pull = jax.vjp(attend, *given)
        return out, *pull(grad)

    return [np.asarray(x) for x in both(*block, jnp.asarray(bias))]


def dense(inputs, seen, cap=None):
    """Return the same, of the mask, in float64."""
    with jax.enable_x64(True):
        *block, grad = (jnp.asarray(x, jnp.float64) for x in inputs)

        def attend(query, key, value, bias):
            scores = jnp.einsum("btnd,bsnd->bnts", query, key) / np.sqrt(8) + bias
            scores = scores if cap is None else cap * jnp.tanh(scores / cap)
            weights = jnp.where(seen, jnp.exp(scores), 0)
            total = weights.sum(-1, keepdims=True)
            weights = weights / jnp.where(total == 0, 1, total)
            return jnp.einsum("bnts,bsnd->btnd", weights, value)

        out, pull = jax.vjp(attend, *block, jnp.zeros(seen.shape, jnp.float64))
        return [np.asarray(x) for x in (out, *pull(grad))]


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("low", [-60_000, -1e9, float(np.finfo(np.float32).min)])
def test_it_hides_keys_as_a_mask_does(low, size, strategy, inputs):
    bias = np.where(SEEN, 0, low).astype(np.float32)
    found = results(inputs, bias, size, strategy=strategy)
    for x, y in zip(found, dense(inputs, SEEN), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    assert not found[0][:, 4:6].any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_least_number_of_a_short_dtype_hides_keys(dtype, inputs):
    bias = jnp.where(SEEN, 0, jnp.finfo(dtype).min).astype(dtype)
    out, *grads = results(inputs, bias, 4, strategy="ring")
    expected, *others = dense(inputs, SEEN)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    for x, y in zip(grads[:3], others[:3], strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_no_cap_shows_what_it_hides(inputs):
    bias = np.where(SEEN, 0, -1e9).astype(np.float32)
    found = results(inputs, bias, 2, logits_soft_cap=2.0)
    for x, y in zip(found, dense(inputs, SEEN, 2.0), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_a_large_one_that_is_above_is_added(inputs):
    """As in jax.nn, which has the same digits."""
    rows = np.random.default_rng(7).normal(size=(1, 1, LENGTH, LENGTH))
    bias = (rows - 1000).astype(np.float32)
    out = results(inputs, bias, 2)[0]
    expected = jax.nn.dot_product_attention(*map(jnp.asarray, (*inputs[:3], bias)))
    np.testing.assert_allclose(out, expected, atol=1e-3)
    assert np.abs(out).min() > 0
