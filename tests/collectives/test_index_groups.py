"""Groups hold in derivatives, under vmap, and where XLA stands in."""

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

GROUPS = [[2, 0], [1, 3]]


CHOICE = catalogue.fixed(2)
CALLS = {n: case for n, case in catalogue.KINDS.items() if case.takes_groups}


def in_groups(model):
    """Return the model of all four ranks, each in its group."""

    def run(stack):
        rows = {}
        for group in GROUPS:
            rows |= dict(zip(group, model(stack[np.array(group)]), strict=True))
        return jnp.stack([rows[rank] for rank in range(4)])

    return run


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_derivatives_in_groups(stacked, near, values, mesh_of, name, check_vma):
    mesh = mesh_of((4,), ("i",))
    x, d = values("float32", (4, 2, 3)), values("float32", (4, 2, 3), 1)
    dense = in_groups(CALLS[name].model(CHOICE))

    def call(x):
        return CALLS[name](jaxcomm, x, "i", CHOICE, axis_index_groups=GROUPS)

    def loss(y):
        return (
            jnp.sin(y).ravel() * jnp.linspace(-1.0, 2.0, y.size, dtype=y.dtype)
        ).sum()

    def program(x, d):
        return jax.grad(lambda x: loss(call(x)))(x), jax.jvp(call, (x,), (d,))[1]

    found = stacked(mesh, program, x, d, check_vma=check_vma)
    expected = (
        jax.grad(lambda s: sum(loss(row) for row in dense(s)))(x),
        jax.jvp(dense, (x,), (d,))[1],
    )
    near(found, jax.tree.map(np.asarray, expected), 2e-5, name, 2e-5)


OF_BOTH_AXES = [[0, 3, 5, 6], [1, 2, 4, 7]]  # of (i, v), row-major


@pytest.mark.parametrize("check_vma", [True, False])
def test_index_groups_over_a_mesh_axis_and_a_vmapped_one(
    stacked, values, mesh_of, check_vma
):
    mesh = mesh_of((4,), ("i",))
    x = values("float32", (4, 2, 3))

    def program(x):
        def call(y):
            o = {"axis_index_groups": OF_BOTH_AXES}
            return (
                jaxcomm.psum(y, ("i", "v"), **o),
                jaxcomm.pmax(y, ("i", "v"), **o),
                jaxcomm.all_gather(y, ("i", "v"), **o),
            )

        return jax.vmap(call, axis_name="v")(x)

    total, most, every = stacked(mesh, program, x, check_vma=check_vma)
    flat = x.reshape(8, 3)
    for group in OF_BOTH_AXES:
        for rank in group:
            i, v = divmod(rank, 2)
            np.testing.assert_allclose(total[i, v], flat[group].sum(0), rtol=1e-5)
            np.testing.assert_array_equal(most[i, v], flat[group].max(0))
            np.testing.assert_array_equal(every[i, v], flat[group])


def test_index_groups_where_xla_emulates(stacked, values, mesh_of):
    mesh = mesh_of((4,), ("i",))
    x = values("float32", (4, 3))
    groups = [[2, 0], [1, 3]]
    found = stacked(
        mesh,
        lambda x: jaxcomm.pprod(x, "i", axis_index_groups=groups, backend="xla"),
        x,
    )
    for group in groups:
        for rank in group:
            np.testing.assert_allclose(found[rank], x[group].prod(0), rtol=1e-6)
