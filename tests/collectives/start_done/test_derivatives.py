"""What the two halves become when they are differentiated and batched."""

import re

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue import SPLIT_PHASE as HALVES
from models import over

import jaxcomm

pytestmark = pytest.mark.host_only(
    reason="derivatives are made of halves, which the other files have over NCCL"
)

NAMES = "ppermute_some", "psum", "all_gather", "psum_scatter", "all_to_all_tiled"
CASES = [catalogue.CASES[name] for name in NAMES]


def test_the_transpose_is_a_pair_on_every_level(mesh):
    def loss(x):
        return jnp.sin(HALVES.all_gather(x, "i")).sum()

    def count(function):
        text = str(jax.make_jaxpr(over(mesh, function))(jnp.ones((4, 3))))
        return [
            len(re.findall(rf"jaxcomm_{name}\[", text))
            for name in (
                "all_gather_start", "all_gather_done", "reduce_scatter_start",
                "reduce_scatter_done", "all_gather", "reduce_scatter",
            )
        ]  # fmt: skip

    assert count(jax.grad(loss)) == [1, 1, 1, 1, 0, 0]
    starts, dones, *rest = count(jax.grad(lambda x: jax.grad(loss)(x).sum()))
    assert starts == dones > 1
    assert rest[0] == rest[1] > 1
    assert rest[2:] == [0, 0]


def test_only_what_has_a_tangent_travels_again(mesh):
    def along(x, n):
        def call(x):
            return HALVES.ring_shift({"n": n, "x": x}, "i")["x"]

        return jax.jvp(call, (x,), (x,))

    text = str(jax.make_jaxpr(over(mesh, along))(jnp.ones(4), jnp.arange(4)))
    starts = re.findall(r"\n(.*) = jaxcomm_permute_start\[", text)
    # Each gives its operands and as many results.
    assert [len(start.split()) for start in starts] == [4, 2]


def test_vmap_over_another_axis_its_own_and_one_of_several(stacked, near, values, mesh):
    x = values("float32", (4, 3, 4, 8))

    def run(lib):
        def call(case, axes="i", size=4):
            choice = catalogue.fixed(size)
            return lambda x: case(lib, x, axes, choice)

        def over_another(f, x):
            last = jnp.moveaxis(x, 0, -1)
            return (
                jax.vmap(f, in_axes=-1, out_axes=-1)(last),
                jax.vmap(jax.grad(lambda x: jnp.sin(f(x)).sum()))(x),
                jax.vmap(lambda y: f(x[0] * y), axis_size=3)(jnp.arange(3.0)),
            )

        def over_its_own(f, x):
            mapped = jax.vmap(f, axis_name="i")
            return mapped(x), jax.grad(lambda x: mapped(x).sum())(x)

        def over_one_of_two(f, x):
            return jax.vmap(f, axis_name="v")(x[:2])

        return (
            stacked(mesh, lambda x: [over_another(call(c), x) for c in CASES], x),
            jax.jit(lambda x: [over_its_own(call(c), x) for c in CASES])(x[:, 0]),
            stacked(
                mesh,
                lambda x: [
                    over_one_of_two(call(c, ("i", "v"), 8), x) for c in CASES[:2]
                ],
                x,
            ),
        )

    # float32 sums of a few dozen terms in another order.
    near(run(HALVES), run(jaxcomm), 2e-5, "", 2e-5)


# What is computed from a handle's ``then`` comes after the start, and is the same.


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
