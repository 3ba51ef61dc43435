"""Our collectives beside XLA's own, and beside callbacks, in one program.

If the two block each other, XLA ends the process.
"""

import jax
import numpy as np
import pytest
from models import over

import jaxcomm

BOTH = ("a", "b")
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]
X = np.arange(24, dtype=np.float32).reshape(8, 3)


@pytest.fixture
def run(make_mesh):
    mesh, split = make_mesh(a=2, b=4), jax.P(BOTH)

    def run(call, *more):
        # What `more` holds is the same on all devices, and so is the result.
        specs = (*[jax.P()] * len(more), split)
        program = over(mesh, call, specs, jax.P() if more else split)
        for _ in range(10):
            found = jax.block_until_ready(program(*more, X))
        return found

    return run


def test_calls_that_do_not_depend_on_each_other(run):
    def program(x):
        return [
            lib.ppermute(lib.psum(x + k, "b"), "a", [(0, 1), (1, 0)])
            for k in range(6)
            for lib in (jaxcomm, jax.lax)
        ]

    found = run(program)
    for ours, lax in zip(found[::2], found[1::2], strict=True):
        np.testing.assert_array_equal(ours, lax)


def test_calls_of_each_others_results(run):
    def program(x, libs=(jaxcomm, jax.lax)):
        for lib in libs * 3:
            x = lib.pmean(lib.ppermute(x, "b", RING), "a") + x
        return x

    found, expected = run(program), run(lambda x: program(x, (jax.lax, jax.lax)))
    np.testing.assert_array_equal(found, expected)


def test_callbacks(run):
    def program(x):
        for _ in range(6):
            x = jaxcomm.ring_shift(x, BOTH)
            scalar = jax.ShapeDtypeStruct((), np.float32)
            x = x + jax.pure_callback(lambda: np.float32(1), scalar)
        return x, jaxcomm.pmax(x, "a")

    np.testing.assert_array_equal(run(program)[0], np.roll(X, 6, 0) + 6)


def test_gradients_that_xla_sums(run):
    def loss(w, x):
        w = jax.lax.pcast(w, BOTH, to="varying")
        return jaxcomm.pmean((jaxcomm.ring_shift(x, "b") * w[None]).sum(), BOTH)

    found = run(jax.grad(loss), np.arange(3, dtype=np.float32))
    np.testing.assert_allclose(found, X.mean(0), rtol=1e-6)
