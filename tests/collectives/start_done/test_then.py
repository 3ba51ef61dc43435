"""What is computed from a handle's ``then`` comes after the start, and is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import over

import jaxcomm

pytestmark = pytest.mark.host_only(
    reason="it is of the trace, whatever carries the collective out"
)


def by_halves(x):
    arriving = jaxcomm.ring_shift_start(x, "i")
    x, twice = arriving.then((x, x * 2))
    y = jnp.sin(x) * twice
    return arriving.done(after=y) + y


def whole(x):
    ring = [(rank, (rank + 1) % 4) for rank in range(4)]
    return jax.lax.ppermute(x, "i", ring) + jnp.sin(x) * x * 2


def test_values_and_derivatives_are_those_of_the_whole(mesh):
    x = jnp.linspace(0.1, 2.0, 24).reshape(8, 3)

    def results(function):
        program = over(mesh, function)
        loss = jax.value_and_grad(lambda x: (program(x) ** 2).sum())
        return jax.jit(lambda x: (program(x), *jax.vmap(loss)(x[None] + 1)))(x)

    for found, expected in zip(results(by_halves), results(whole), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def sum_by_halves(x):
    arriving = jaxcomm.psum_start(x, "i")
    return arriving.done(after=jnp.tanh(arriving.then(x)))


def gather_by_halves(x):
    arriving = jaxcomm.all_gather_start(x, "i", tiled=True, to="invarying")
    y = jnp.tanh(arriving.then(x))
    return arriving.done(after=y).sum(keepdims=True)


@pytest.mark.parametrize("function", [sum_by_halves, gather_by_halves])
def test_what_is_equal_on_all_devices_stays_so(mesh, function):
    def both(x, scale):
        # The loss of device i is i times the sum.
        weight = jax.lax.axis_index("i").astype(float)
        gradient = jax.grad(lambda x: (function(x) * weight).sum())(x)
        arriving = jaxcomm.psum_start(x, "i")
        scale = arriving.then(scale)
        return function(x) + 0 * arriving.done(), scale * 2, gradient

    specs, out = (jax.P("i"), jax.P()), (jax.P(), jax.P(), jax.P("i"))
    total, scale, gradients = over(mesh, both, specs, out)(jnp.arange(4.0), 3.0)
    np.testing.assert_array_equal(total, [6.0])
    np.testing.assert_array_equal(gradients, [6.0] * 4)
    assert scale == 6
