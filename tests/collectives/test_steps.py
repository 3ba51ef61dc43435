"""pbarrier(step=): ranks compare the number of their step."""

import functools

import jax
import numpy as np
import pytest

import jaxcomm

SIZE = 4
X = np.arange(SIZE * 3, dtype=np.float32).reshape(SIZE, 3)


def barrier(x, step):
    return jaxcomm.pbarrier({"x": x, "n": x.astype(int)}, "i", step=step)


def test_equal_steps_let_through_and_others_raise_or_are_nan(
    stacked, mesh, default_backend
):
    equal, late = np.full(SIZE, 7, np.int16), np.int32([7, 7, 6, 7])
    for backend in {default_backend, "xla"}:
        call = functools.partial(stacked, mesh, barrier, X)
        with jaxcomm.using(backend=backend):
            found = call(equal)
            np.testing.assert_array_equal(found["x"], X)
            np.testing.assert_array_equal(found["n"], X.astype(int))
            if backend == "host":
                says = "rank 0 is in step 7, and rank 2 in step 6. One of them has left"
                with pytest.raises(jax.errors.JaxRuntimeError, match=says):
                    jax.block_until_ready(call(late))
            else:
                found = call(late)
                assert np.isnan(found["x"]).all()
                assert (np.asarray(found["n"]) < 0).all()


@pytest.mark.host_only(reason="made before there is a backend, or of collectives")
def test_it_works_in_loops_under_vmap_and_in_gradients(stacked, mesh):
    def steps(x):
        def advance(step, x):
            return jaxcomm.pbarrier(x, "i", step=step) + 1

        return jax.lax.fori_loop(0, 3, advance, x)

    def rows(x):
        return jax.vmap(lambda x: jaxcomm.pbarrier(x, "i", step=1))(x)

    def gradient(x):
        return jax.grad(lambda x: (jaxcomm.pbarrier(x, "i", step=1) ** 2).sum())(x)

    found = stacked(mesh, lambda x: (steps(x), rows(x), gradient(x)), X)
    for got, expected in zip(found, (X + 3, X, 2 * X), strict=True):
        np.testing.assert_array_equal(got, expected)
    # Devices that jax.vmap plays.
    alike = jax.vmap(lambda x, n: barrier(x, n)["x"], axis_name="i")
    np.testing.assert_array_equal(alike(X, np.full(SIZE, 2)), X)
    assert np.isnan(alike(X, np.arange(SIZE))).all()
