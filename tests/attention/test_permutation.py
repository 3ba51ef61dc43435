"""A permutation of tokens, and its gradient, beside NumPy's."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.attention.layout import Layout
from jaxcomm.attention.permutation import permute

RANDOM = np.random.default_rng(0)
ORDERS = {
    "none": np.zeros(0, np.int32),
    "one token": np.zeros(1, np.int32),
    "natural": np.arange(12),
    "backwards": np.arange(12)[::-1],
    "any": RANDOM.permutation(13),
    "of more runs than are copied": RANDOM.permutation(1000),
    "zigzag": Layout("zigzag", 4, 40).all_positions(),
    "striped": Layout("striped", 4, 40).all_positions(),
    "striped, collected": np.argsort(Layout("striped", 4, 40).all_positions()),
    "striped of one token each": Layout("striped", 4, 4).all_positions(),
}


@pytest.mark.parametrize("name", ORDERS)
def test_it_is_what_numpy_takes_and_its_gradient_puts_back(name):
    axis, places = list(ORDERS).index(name) % 3, ORDERS[name]
    shape = [2, 3, 2]
    shape[axis] = len(places)
    x, weights = RANDOM.standard_normal((2, *shape)).astype(np.float32)
    out, transpose = jax.vjp(lambda x: permute(x, places, axis), x)
    np.testing.assert_array_equal(out, np.take(x, places, axis))
    (grad,) = transpose(jnp.asarray(weights))
    expected = np.take(weights, np.argsort(places), axis)
    np.testing.assert_array_equal(grad, expected)


@pytest.mark.parametrize("name", ["natural", "zigzag", "striped"])
def test_orders_of_layouts_neither_gather_nor_scatter(name):
    def of_squares(x):
        return (permute(x, ORDERS[name], 1) ** 2).sum()

    x = jnp.ones((2, len(ORDERS[name])))
    text = str(jax.make_jaxpr(jax.grad(of_squares))(x))
    assert not re.search("gather|scatter", text), text
