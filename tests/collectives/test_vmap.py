"""Collectives under vmap, also over the axis that they communicate along."""

import catalogue
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


def mapped(case, x, axes, choice):
    return jax.vmap(lambda x: case(jaxcomm, x, axes, choice), axis_name="v")(x)


def test_vmap_over_the_axis_of_the_collective_needs_no_mesh(near, values):
    x, choice = values("float32", (4, 4, 8)), catalogue.fixed(4)
    found = jax.jit(
        lambda x: {n: mapped(c, x, "v", choice) for n, c in catalogue.CASES.items()}
    )(x)
    for name, case in catalogue.CASES.items():
        near(found[name], case.model(choice)(x), ROUNDING, name, ROUNDING)
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
    choice = catalogue.fixed(8)
    # ragged_all_to_all is not batched over one of several axes.
    cases = {n: c for n, c in catalogue.KINDS.items() if n != "ragged_all_to_all"}
    sequence = np.moveaxis(x, [places[a] for a in order], [0, 1]).reshape(8, 8, 16)

    def program(x):
        return {n: mapped(case, x, order, choice) for n, case in cases.items()}

    found = stacked(mesh, program, x)
    for name, case in cases.items():
        results = case.model(choice)(sequence)
        shape = [x.shape[places[a]] for a in order]
        results = results.reshape(*shape, *results.shape[1:])
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
