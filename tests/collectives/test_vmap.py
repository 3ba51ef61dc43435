"""Collectives under vmap, also over the axis that they communicate along."""

import dataclasses

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

# float32 sums of a few dozen terms in another order than jax.lax's or numpy's.
ROUNDING = 2e-5

pytestmark = pytest.mark.host_only(reason="batched before there is a backend")


def test_vmap_with_some_leaves_unbatched(stacked, identical, mesh, x):
    def call(a, b):
        return jaxcomm.psum((a, b), "i"), jaxcomm.all_gather((a, b), "i", axis=1)

    axes = ((0, None), (0, None))
    program = jax.vmap(call, in_axes=(0, None), out_axes=axes)
    sums, gathered = stacked(mesh, lambda x: program(x, x), x)
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


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("axes", "groups"),  # row-major
    [("v", [[0, 3], [2, 1]]), (("i", "v"), [[0, 3, 5, 6], [1, 2, 4, 7]])],
)
def test_index_groups_divide_vmapped_axes(
    stacked, values, mesh_of, axes, groups, check_vma
):
    x = values("float32", (1 if axes == "v" else 2, 4, 3))  # devices, mapped, data

    def call(x):
        grouped = {"axis_index_groups": groups}
        return jaxcomm.psum(x, axes, **grouped), jaxcomm.all_gather(x, axes, **grouped)

    program, mesh = jax.vmap(call, axis_name="v"), mesh_of((len(x),), ("i",))
    results = stacked(mesh, program, x, check_vma=check_vma)
    ranks = x.reshape(-1, 3)
    total, every = (np.asarray(y).reshape(len(ranks), -1, 3) for y in results)
    for group in groups:
        for rank in group:
            np.testing.assert_allclose(total[rank, 0], ranks[group].sum(0), rtol=1e-5)
            np.testing.assert_array_equal(every[rank], ranks[group])


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


def test_vmap_of_a_shared_result_may_say_out_axes_none(values):
    def results(x):
        calls = jaxcomm.psum, jaxcomm.pmax, jaxcomm.all_gather
        return [*(call(x, "v") for call in calls), jaxcomm.pbroadcast(x, "v", 0)]

    x = values("float32", (4, 8))
    shared = jax.jit(jax.vmap(results, axis_name="v", out_axes=None))(x)
    every = jax.jit(jax.vmap(results, axis_name="v"))(x)
    for one, of_each in zip(shared, every, strict=True):
        np.testing.assert_array_equal(one, of_each[3])


def test_the_backward_pass_of_a_custom_vjp_knows_the_mapped_axis():
    """There JAX names the axis to rules for batching alone, and not its extent."""

    swap = [(0, 1), (1, 0)]

    def loss(twin):
        send = jax.custom_vjp(lambda x: twin.ppermute(x, "r", swap))
        send.defvjp(
            lambda x: (send(x), None),
            lambda _, ct: (twin.ppermute(twin.psum(ct, "r") + ct, "r", swap),),
        )
        return lambda x: (jax.vmap(send, axis_name="r")(x) * x).sum()

    ours, lax = (
        jax.jit(jax.grad(loss(lib)))(jnp.arange(1.0, 3.0)) for lib in (jaxcomm, jax.lax)
    )
    np.testing.assert_array_equal(ours, lax)


def test_a_python_number_in_a_jitted_function_is_an_operand_like_any_other(near):
    """It comes to rules as it stands in the program: a number without a shape."""
    takes_columns = {"psum_scatter", "pscatter", "ragged_all_to_all", "pcast"}
    names = takes_columns | {"all_to_all", "pswapaxes"}
    cases = {n: c for n, c in catalogue.FUNCTIONS.items() if n not in names}
    for name in "all_gather", "pgather":  # along a dimension that numbers have
        cases[name] = dataclasses.replace(cases[name], arguments=lambda choice: {})
    twins = {n for n, c in cases.items() if c.twin}
    choice = catalogue.fixed(4)

    def program(lib, number, names=cases, **options):
        def calls(x):
            # The second leaf is traced: a psum of numbers alone is a number.
            both = number, x
            return {n: cases[n](lib, both, "v", choice, **options) for n in names}

        def chosen(x):
            return jax.lax.cond(
                x.sum() > -1, calls, lambda x: jax.tree.map(jnp.zeros_like, calls(x)), x
            )

        def slope(x):
            return jax.grad(lambda x: sum(map(jnp.sum, jax.tree.leaves(calls(x)))))(x)

        each = jax.jit(calls), chosen, slope if lib is jaxcomm else calls
        return lambda x: [call(x) for call in each]

    pairs = [n for n in cases if cases[n].starts]
    x = np.arange(4, dtype=np.float32)
    found, expected, lax, halves = (
        jax.jit(jax.vmap(run, axis_name="v"))(x)
        for run in (
            program(jaxcomm, 2.0),
            program(jaxcomm, np.full((), 2.0, np.float32)),
            program(jax.lax, 2.0, twins),
            program(catalogue.SPLIT_PHASE, 2.0, pairs, after=False),
        )
    )
    near(found, expected, ROUNDING)
    for of_ours, of_lax, of_pairs in zip(found[:2], lax[:2], halves[:2], strict=True):
        near({name: of_ours[name] for name in twins}, of_lax, ROUNDING)
        near({name: of_ours[name] for name in of_pairs}, of_pairs, ROUNDING)
