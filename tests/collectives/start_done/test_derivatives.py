"""The two halves under every transformation, against the whole collective."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue import SPLIT_PHASE as HALVES

import jaxcomm

pytestmark = pytest.mark.host_only(
    reason="derivatives are made of halves, which the other files have over NCCL"
)

RING = [(0, 1), (1, 2), (2, 3), (3, 0)]
SOME = [(0, 2), (3, 1)]
# float32 sums of a few dozen terms in another order than the oracle's.
ROUNDING = 2e-5

# Functions of one (4, 8) array on each of 4 devices.
TWINS = {
    "ppermute_some": lambda lib, x: lib.ppermute(x, "i", SOME),
    "psum": lambda lib, x: lib.psum(x, "i"),
    "all_gather": lambda lib, x: lib.all_gather(x, "i", axis=1),
    "all_gather_tiled": lambda lib, x: lib.all_gather(x, "i", axis=1, tiled=True),
    "psum_scatter": lambda lib, x: lib.psum_scatter(x, "i"),
    "all_to_all_tiled": lambda lib, x: lib.all_to_all(x, "i", 1, 0, tiled=True),
}


def _loss(result):
    result = jnp.sin(result)
    weights = jnp.linspace(-1.0, 2.0, result.size, dtype=result.dtype)
    return (result.ravel() * weights).sum()


def _derivatives(call, x, direction):
    def local_loss(x):
        return _loss(call(x))

    gradient, second = jax.jvp(jax.grad(local_loss), (x,), (direction,))
    return {
        "jvp": jax.jvp(call, (x,), (direction,)),
        "grad": gradient,
        "grad along a direction": second,
        "grad of grad": jax.grad(lambda x: (jax.grad(local_loss)(x) * direction).sum())(
            x
        ),
    }


def _in_other_functions(call, x, direction):
    @jax.custom_vjp
    def custom(x):
        return call(x)

    custom.defvjp(lambda x: (call(x), x), lambda x, ct: (jax.vjp(call, x)[1](ct)[0],))

    def scanned(x):
        def step(carry, k):
            return carry + k * _loss(call(carry * x)), None

        return jax.lax.scan(step, x.sum() * 0, jnp.arange(3.0))[0]

    def in_a_loop(x):
        return jax.lax.fori_loop(0, 2, lambda k, c: c + _loss(call(c * x)), x.sum())

    def checkpointed(x):
        return _loss(jax.checkpoint(lambda x: jnp.cos(call(x * x)))(x))

    return {
        "jvp of a loop": jax.jvp(in_a_loop, (x,), (direction,)),
        "checkpoint": jax.grad(checkpointed)(x),
        "custom_vjp": jax.grad(lambda x: _loss(custom(x)))(x),
        "scan": jax.grad(scanned)(x),
        "linearize": jax.linearize(call, x)[1](direction),
        "jit": jax.grad(lambda x: _loss(jax.jit(call)(x * 2)))(x),
    }


@pytest.mark.parametrize(
    ("derivatives", "names", "check_vma"),
    [
        (_derivatives, TWINS, True),
        (_derivatives, TWINS, False),
        (_in_other_functions, ("psum", "all_gather_tiled"), True),
    ],
)
def test_derivatives_are_those_of_jax_lax(
    stacked, near, values, mesh, derivatives, names, check_vma
):
    x, direction = values("float32", (4, 4, 8)) * 0.5, values("float32", (4, 4, 8), 1)

    def program(lib):
        def run(x, direction):
            return {
                name: derivatives(functools.partial(TWINS[name], lib), x, direction)
                for name in names
            }

        return run

    def run(lib):
        return stacked(mesh, program(lib), x, direction, check_vma=check_vma)

    found, expected = run(HALVES), run(jax.lax)
    for name in names:
        for what in expected[name]:
            near(found[name][what], expected[name][what], 1e-4, f"{name}: {what}", 1e-4)


def test_the_transpose_is_a_pair_on_every_level(mesh):
    def loss(x):
        return _loss(HALVES.all_gather(x, "i"))

    def count(function):
        everywhere = jax.P("i")
        program = jax.shard_map(
            function, mesh=mesh, in_specs=everywhere, out_specs=everywhere
        )
        text = str(jax.make_jaxpr(program)(jnp.ones((4, 3))))
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


def test_integers_travel_beside_what_is_differentiated(stacked, identical, mesh):
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    n = np.arange(8, dtype=np.int32).reshape(4, 2)

    def program(x, n):
        def loss(x, n):
            tree = HALVES.all_gather({"n": n, "x": x}, "i", axis=1)
            tree = HALVES.ppermute(tree, "i", RING)
            return (tree["x"] ** 2).sum(), tree["n"]

        return jax.grad(loss, has_aux=True)(x, n)

    gradient, counts = stacked(mesh, program, x, n)
    identical(gradient, 8 * x)
    identical(counts, np.broadcast_to(n.T[None], (4, 2, 4)))


def test_only_what_has_a_tangent_travels_again(mesh):
    def call(x, n):
        return HALVES.ppermute({"n": n, "x": x}, "i", RING)["x"]

    def along(x, n):
        return jax.jvp(lambda x: call(x, n), (x,), (x,))

    everywhere = jax.P("i")
    program = jax.shard_map(along, mesh=mesh, in_specs=everywhere, out_specs=everywhere)
    text = str(jax.make_jaxpr(program)(jnp.ones(4), jnp.arange(4)))
    starts = re.findall(r"\n(.*) = jaxcomm_permute_start\[", text)
    # Each gives its operands and as many results.
    assert [len(start.split()) for start in starts] == [4, 2]


def test_vmap_over_another_axis_and_over_its_own(stacked, near, values, mesh):
    x = values("float32", (4, 3, 4, 8))

    def program(lib):
        def run(call, x):
            last = jnp.moveaxis(x, 0, -1)
            return (
                jax.vmap(call, in_axes=-1, out_axes=-1)(last),
                jax.vmap(jax.grad(lambda x: _loss(call(x))))(x),
                jax.vmap(lambda y: call(x[0] * y), axis_size=3)(jnp.arange(3.0)),
            )

        return lambda x: [run(functools.partial(f, lib), x) for f in TWINS.values()]

    near(
        stacked(mesh, program(HALVES), x), stacked(mesh, program(jaxcomm), x), ROUNDING
    )

    def own(lib):
        def run(call, x):
            mapped = jax.vmap(call, axis_name="i")
            return mapped(x), jax.grad(lambda x: mapped(x).sum())(x)

        calls = [functools.partial(f, lib) for f in TWINS.values()]
        return jax.jit(lambda x: [run(call, x) for call in calls])(x[:, 0])

    near(own(HALVES), own(jaxcomm), ROUNDING, "", ROUNDING)


def test_vmap_over_one_of_several_axes(stacked, near, values, mesh):
    x = values("float32", (4, 2, 3))
    pairs = [(k, (k + 3) % 8) for k in range(8)]

    def program(lib):
        def call(x):
            return lib.psum(x, ("i", "v")), lib.ppermute(x, ("i", "v"), pairs)

        return lambda x: jax.vmap(call, axis_name="v")(x)

    near(stacked(mesh, program(HALVES), x), stacked(mesh, program(jaxcomm), x), 1e-5)
