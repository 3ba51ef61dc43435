"""What is computed from a handle's ``then`` comes after the start, and is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm


def by_halves(x):
    arriving = jaxcomm.ring_shift_start(x, "i")
    x, twice = arriving.then((x, x * 2))
    y = jnp.sin(x) * twice
    return arriving.done(after=y) + y


def whole(x):
    size = jax.lax.axis_size("i")
    ring = [(rank, (rank + 1) % size) for rank in range(size)]
    return jax.lax.ppermute(x, "i", ring) + jnp.sin(x) * x * 2


def test_values_and_derivatives_are_those_of_the_whole(mesh_of):
    mesh = mesh_of((4,), ("i",))
    x = jnp.linspace(0.1, 2.0, 24).reshape(8, 3)

    def program(function):
        return jax.jit(
            jax.shard_map(
                function, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i")
            )
        )

    def loss(function):
        return lambda x: (program(function)(x) ** 2).sum()

    np.testing.assert_allclose(program(by_halves)(x), program(whole)(x), rtol=1e-6)
    found, expected = jax.grad(loss(by_halves))(x), jax.grad(loss(whole))(x)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    batched = jax.vmap(program(by_halves))(jnp.stack([x, x + 1]))
    np.testing.assert_allclose(batched[1], program(whole)(x + 1), rtol=1e-6)


def test_the_start_comes_first_in_the_program(mesh_of):
    mesh = mesh_of((4,), ("i",))
    program = jax.jit(
        jax.shard_map(by_halves, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"))
    )
    text = program.lower(jnp.ones((8, 3))).as_text()
    start, barrier = (
        text.index("jaxcomm.permute.start"),
        text.index("optimization_barrier"),
    )
    assert start < barrier < text.index("stablehlo.sine") < text.index("jaxcomm.done")


def sum_by_halves(x):
    arriving = jaxcomm.psum_start(x, "i")
    return arriving.done(after=jnp.tanh(arriving.then(x)))


def gather_by_halves(x):
    arriving = jaxcomm.all_gather_start(x, "i", tiled=True, to="invarying")
    y = jnp.tanh(arriving.then(x))
    return arriving.done(after=y).sum(keepdims=True)


@pytest.mark.parametrize("function", [sum_by_halves, gather_by_halves])
def test_what_is_equal_on_all_devices_stays_so(mesh_of, function):
    mesh = mesh_of((4,), ("i",))
    x = jnp.arange(4.0)

    def gradient(x):
        # The loss of device i is i times the sum.
        return jax.grad(
            lambda x: (function(x) * jax.lax.axis_index("i").astype(float)).sum()
        )(x)

    def program(function, out):
        return jax.jit(
            jax.shard_map(function, mesh=mesh, in_specs=jax.P("i"), out_specs=out)
        )

    np.testing.assert_array_equal(program(function, jax.P())(x), [6.0])
    np.testing.assert_array_equal(program(gradient, jax.P("i"))(x), [6.0] * 4)


def test_what_is_replicated_comes_back_so(mesh_of):
    def function(x, scale):
        arriving = jaxcomm.psum_start(x, "i")
        scale = arriving.then(scale)
        return arriving.done(), scale * 2

    program = jax.jit(
        jax.shard_map(
            function,
            mesh=mesh_of((4,), ("i",)),
            in_specs=(jax.P("i"), jax.P()),
            out_specs=(jax.P(), jax.P()),
        )
    )
    total, scale = program(jnp.arange(4.0), jnp.float32(3))
    assert (float(total[0]), float(scale)) == (6.0, 6.0)


def test_a_finished_handle_is_refused(mesh_of):
    def late(x):
        arriving = jaxcomm.ring_shift_start(x, "i")
        y = arriving.done()
        return arriving.then(y)

    mesh = mesh_of((4,), ("i",))
    program = jax.shard_map(late, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"))
    with pytest.raises(ValueError, match=r"then: ring_shift_start.* was finished"):
        jax.jit(program)(jnp.ones(8))
