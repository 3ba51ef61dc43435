import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.attention.merge import merge


def _partial(scores, values):
    lse = jax.nn.logsumexp(scores)
    return (jnp.exp(scores - lse)[:, None] * values).sum(0), lse


def test_parts_merge_to_the_whole_in_any_order():
    rng = np.random.default_rng(0)
    scores = jnp.asarray(30 * rng.standard_normal(24), jnp.float32)
    values = jnp.asarray(rng.standard_normal((24, 5)), jnp.float32)
    expected = _partial(scores, values)
    parts = [_partial(scores[i : i + 8], values[i : i + 8]) for i in (0, 8, 16)]
    for first, second, third in itertools.permutations(parts):
        found = merge(*merge(*first, *second), *third)
        # A few roundings of float32 values of order one; lse is of order 100.
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)


def test_an_empty_part_changes_nothing_and_two_stay_empty():
    out, lse = jnp.array([[2.0, 3.0]]), jnp.array([700.0])
    nothing = jnp.zeros_like(out), jnp.array([-jnp.inf])
    for found in (merge(out, lse, *nothing), merge(*nothing, out, lse)):
        np.testing.assert_array_equal(found[0], out)
        np.testing.assert_array_equal(found[1], lse)
    found = merge(*nothing, *nothing)
    np.testing.assert_array_equal(found[0], jnp.zeros_like(out))
    assert jnp.isneginf(found[1]).all()


def test_a_far_smaller_part_vanishes_without_overflow():
    out, lse = merge(
        jnp.array([[1.0]]), jnp.array([-3e38]), jnp.array([[5.0]]), jnp.array([3e38])
    )
    assert out.tolist() == [[5.0]]
    np.testing.assert_allclose(lse, 3e38)
