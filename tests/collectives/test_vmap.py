"""Collectives under vmap, also over the axis that they communicate along."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

# float32 sums of a few dozen terms in another order than jax.lax's or numpy's.
ROUNDING = 2e-5

SOME = [(0, 2), (3, 1)]


def test_vmap_with_some_leaves_unbatched(stacked, identical, mesh, x):
    def program(x):
        def call(a, b):
            return jaxcomm.psum((a, b), "i"), jaxcomm.all_gather((a, b), "i", axis=1)

        return jax.vmap(call, in_axes=(0, None), out_axes=((0, None), (0, None)))(x, x)

    sums, gathered = stacked(mesh, program, x)
    identical(gathered[0][0], np.moveaxis(x, 0, 2))
    identical(gathered[1][0], np.moveaxis(x, 0, 1))
    identical(sums[0], sums[1])


AXIS_CALLS = {
    "psum": lambda lib, x, a: lib.psum(x, a),
    "pmean": lambda lib, x, a: lib.pmean(x, a),
    "pmax": lambda lib, x, a: lib.pmax(x, a),
    "all_gather": lambda lib, x, a: lib.all_gather(x, a),
    "all_gather_tiled": lambda lib, x, a: lib.all_gather(x, a, axis=1, tiled=True),
    "psum_scatter": lambda lib, x, a: lib.psum_scatter(x, a, tiled=True),
    "all_to_all": lambda lib, x, a: lib.all_to_all(x, a, 0, 1, tiled=True),
}


def test_vmap_over_the_axis_of_the_collective_needs_no_mesh(identical, near, values):
    x = values("float32", (4, 8, 3))

    def run(lib):
        return {
            name: jax.vmap(lambda x, c=call: c(lib, x, "v"), axis_name="v")(x)
            for name, call in AXIS_CALLS.items()
        }

    ours, lax = jax.jit(lambda: run(jaxcomm))(), jax.jit(lambda: run(jax.lax))()
    near(ours, lax, ROUNDING, "", ROUNDING)
    permuted = jax.vmap(lambda x: jaxcomm.ppermute(x, "v", SOME), axis_name="v")(x)
    expected = np.zeros_like(x)  # jax.lax wants full permutations here
    for source, target in SOME:
        expected[target] = x[source]
    identical(permuted, expected)
    stacks = {
        "scan": (jaxcomm.pscan, np.cumsum(x, 0)),
        "ring_shift": (jaxcomm.ring_shift, np.roll(x, 1, 0)),
        "broadcast": (
            lambda x, axis: jaxcomm.pbroadcast(x, axis, 0),
            np.stack([x[0]] * 4),
        ),
        "barrier": (jaxcomm.pbarrier, x),
    }
    for name, (call, expected) in stacks.items():
        found = jax.vmap(lambda x, c=call: c(x, "v"), axis_name="v")(x)
        near(found, expected, ROUNDING, name, ROUNDING)
    assert len(jaxcomm.communicators()) == 0


def test_index_groups_divide_a_vmapped_axis(near, values):
    x = values("float32", (4, 8))
    groups = [[0, 3], [2, 1]]

    def local(x):
        return (
            jaxcomm.psum(x, "v", axis_index_groups=groups),
            jaxcomm.all_gather(x, "v", axis_index_groups=groups),
        )

    sums, gathered = jax.vmap(local, axis_name="v")(x)
    for group in groups:
        for rank in group:
            np.testing.assert_allclose(sums[rank], x[group].sum(0), rtol=ROUNDING)
            np.testing.assert_array_equal(gathered[rank], x[group])


@pytest.mark.parametrize("order", [("i", "v"), ("v", "i")])
def test_vmap_over_one_axis_of_several(stacked, near, mesh, values, order):
    """The ranks are those of a mesh on which the vmapped axis is a real one."""
    x = values("float32", (4, 2, 8, 16))  # device, vmapped, data
    places = {"i": 0, "v": 1}
    sequence = np.moveaxis(x, [places[a] for a in order], [0, 1]).reshape(8, 8, 16)

    def program(x):
        return {
            name: jax.vmap(lambda x, c=call: c(jaxcomm, x, order), axis_name="v")(x)
            for name, call in AXIS_CALLS.items()
        } | {
            "scan": jax.vmap(lambda x: jaxcomm.pscan(x, order), axis_name="v")(x),
            "broadcast": jax.vmap(
                lambda x: jaxcomm.pbroadcast(x, order, 5), axis_name="v"
            )(x),
        }

    found = stacked(mesh, program, x)
    expected = {
        name: jax.vmap(lambda x, c=call: c(jax.lax, x, "w"), axis_name="w")(sequence)
        for name, call in AXIS_CALLS.items()
    }
    expected |= {
        "scan": np.cumsum(sequence, 0),
        "broadcast": np.stack([sequence[5]] * 8),
    }
    for name, results in expected.items():
        shape = [x.shape[places[a]] for a in order]
        results = np.asarray(results).reshape(*shape, *results.shape[1:])
        results = np.moveaxis(results, [0, 1], [places[a] for a in order])
        near(found[name], results, ROUNDING, name, ROUNDING)


@pytest.mark.parametrize("order", [("i", "v"), ("v", "i")])
def test_a_permutation_over_a_vmapped_axis_and_a_mesh_axis(
    stacked, identical, mesh, values, order
):
    """A vmapped axis is none of the mesh's: it counts where it is named."""
    x = values("float32", (4, 2, 3))
    perm = [(0, 5), (5, 2), (2, 7), (7, 0), (1, 1)]

    def program(lib):
        return lambda x: jax.vmap(
            lambda x: lib.ppermute(x, order, perm), axis_name="v"
        )(x)

    found = np.asarray(stacked(mesh, program(jaxcomm), x))
    places = {"i": 0, "v": 1}
    sequence = np.moveaxis(x, [places[a] for a in order], [0, 1]).reshape(8, 3)
    moved = np.zeros_like(sequence)
    for source, target in perm:
        moved[target] = sequence[source]
    moved = moved.reshape(*(x.shape[places[a]] for a in order), 3)
    identical(found, np.moveaxis(moved, [0, 1], [places[a] for a in order]))


def _first(x, axis):
    return jaxcomm.pbroadcast(x, axis, 0)


def test_vmap_of_a_shared_result_may_say_out_axes_none(values):
    x = values("float32", (4, 8))
    for call in (jaxcomm.psum, jaxcomm.pmax, jaxcomm.all_gather, _first):
        shared = jax.vmap(lambda x, c=call: c(x, "v"), axis_name="v", out_axes=None)(x)
        every = jax.vmap(lambda x, c=call: c(x, "v"), axis_name="v")(x)
        np.testing.assert_array_equal(shared, every[3])


def test_the_backward_pass_of_a_custom_vjp_knows_the_mapped_axis():
    """There JAX names the axis to rules for batching alone, and not its extent."""

    def loss(twin):
        @jax.custom_vjp
        def send(x):
            return twin.ppermute(x, "r", [(0, 1), (1, 0)])

        def backward(_, grad):
            return (twin.ppermute(twin.psum(grad, "r") + grad, "r", [(0, 1), (1, 0)]),)

        send.defvjp(lambda x: (send(x), None), backward)
        return lambda x: (jax.vmap(send, axis_name="r")(x) * x).sum()

    x = jnp.arange(1.0, 3.0)
    np.testing.assert_array_equal(
        jax.grad(loss(jaxcomm))(x), jax.grad(loss(jax.lax))(x)
    )
