"""What of NCCL every collective becomes; tests/collectives runs over NCCL, too."""

import catalogue
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

import jaxcomm

pytestmark = pytest.mark.usefixtures("stand_in")

DTYPES = "float32", "bfloat16", "bool", "complex64", "float8_e4m3fn"


def mesh_of(size, order=None):
    order = range(size) if order is None else order
    devices = np.array([jax.devices()[i] for i in order])
    return jax.sharding.Mesh(devices, ("i",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.parametrize("elements", [600_001, 1])
def test_sums_of_16_bit_floats_are_rounded_once(stand_in, elements):
    """Above 1 MiB in two phases, so that the wide sums do not travel."""
    mesh = mesh_of(4)
    x = np.ones((4, elements), jnp.bfloat16)
    # In bfloat16, 256 + 1 is 256; the sum is 259, and 260 is next to it.
    x[0] = 256
    stand_in.clear()
    found = models.run_stacked(mesh, lambda x: jaxcomm.psum(x, "i"), x)
    models.assert_identical(found, np.full_like(x, 260))
    used = stand_in.trace("ncclAllReduce", "ncclAlltoAll", "ncclAllGather")
    used = [call for call in used if call["count"] > 4]
    if elements > 1:
        assert {call["name"] for call in used} == {"ncclAlltoAll", "ncclAllGather"}
    else:
        assert not used


def test_what_nccl_cannot_reduce_is_gathered_alone(stand_in):
    mesh = mesh_of(3)
    x = {
        name: models.random_values(jnp.dtype(name), (3, 5), 0)
        for name in ("complex64", "float32", "int16")
    }
    jaxcomm.init(mesh, "i")
    stand_in.clear()
    found = models.run_stacked(mesh, lambda x: jaxcomm.pprod(x, "i"), x)
    for name, stack in x.items():
        exact = models.apply_by_group(mesh, ("i",), models.all_reduce("prod"), stack)
        models.assert_near(found[name], exact, 1e-5, name, 1e-5)
    gathered = stand_in.trace("ncclAllGather")
    assert [call["count"] for call in gathered] == [5 * 8] * 3
    reduced = stand_in.trace("ncclAllReduce")
    assert [call["count"] for call in reduced] == [5] * 6


def test_means_of_wide_floats_are_ncclavg(stand_in, make_mesh):
    mesh = make_mesh(i=3)
    x = jax.random.normal(jax.random.key(0), (6, 5))

    def means(x):
        return jaxcomm.pmean(x, "i"), jaxcomm.pmean(x.astype(jnp.bfloat16), "i")

    wide, narrow = jax.jit(
        jax.shard_map(means, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P())
    )(x)
    exact = np.asarray(x, np.float64).reshape(3, 2, 5).mean(0)
    np.testing.assert_allclose(wide, exact, rtol=1e-6, atol=1e-7)
    narrow = narrow.astype(jnp.float32)
    np.testing.assert_allclose(narrow, exact, rtol=2e-2, atol=1e-2)
    # kSum and kAvg.
    assert {call["op"] for call in stand_in.trace("ncclAllReduce")} == {0, 4}


def test_means_within_groups_divide_by_what_jax_divides_by(stand_in, make_mesh):
    mesh = make_mesh(i=3)

    def of(lib, **at):
        return jax.jit(
            jax.shard_map(
                lambda x: lib.pmean(x, "i", axis_index_groups=[[0, 2], [1]], **at),
                mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"), check_vma=False,
            )
        )  # fmt: skip

    x = jnp.arange(6.0)
    found = of(jaxcomm)(x)
    np.testing.assert_array_equal(found, of(jaxcomm, backend="host")(x))
    np.testing.assert_array_equal(found, [2, 3, 1, 1.5, 2, 3])


@pytest.mark.parametrize(
    ("order", "dtypes"),
    [
        ((3, 7, 0, 2, 6), DTYPES),
        # Between two, the sums of 16-bit floats are NCCL's own.
        ((0, 1), ("float16", "bfloat16")),
    ],
    ids=["five", "two"],
)
def test_every_collective_is_nccls(stand_in, order, dtypes):
    size = len(order)
    mesh = mesh_of(size, order)
    x = {
        name: models.random_values(jnp.dtype(name), (size, size, 2, 3), seed)
        for seed, name in enumerate(dtypes)
    }
    choice = catalogue.fixed(size)
    # NCCL's own average is tested above, and columns are cut in tests/collectives.
    cases = {
        name: case
        for name, case in catalogue.CASES.items()
        if case.kind != "mean" and not case.cuts_columns
    }

    def program(x):
        return {n: case(jaxcomm, x, "i", choice) for n, case in cases.items()}

    found = models.run_stacked(mesh, program, x)
    for name, case in cases.items():
        for dtype, leaf in x.items():
            what = f"{name} of {dtype}"
            expected = models.apply_by_group(mesh, ("i",), case.model(choice), leaf)
            if dtype == "complex64" and case.kind == "product":
                # By the use of fused multiply-adds.
                models.assert_near(found[name][dtype], expected, 1e-5, what, 1e-5)
            else:
                models.assert_identical(found[name][dtype], expected, what)
    assert {member.backend for member in jaxcomm.communicators()} == {"nccl"}
    used = {call["name"] for call in stand_in.trace()}
    assert used >= {
        "ncclAllGather", "ncclAllReduce", "ncclAlltoAll", "ncclBroadcast",
        "ncclGather", "ncclRecv", "ncclReduce", "ncclReduceScatter", "ncclScatter",
        "ncclSend",
    }  # fmt: skip


def test_what_is_gathered_instead_stays_within_its_groups(stand_in):
    mesh, groups = mesh_of(4), [[2, 0], [1, 3]]
    x = models.random_values(jnp.dtype("complex64"), (4, 5), 0)
    found = models.run_stacked(
        mesh, lambda x: jaxcomm.pmax(x, "i", axis_index_groups=groups), x
    )
    models.assert_identical(
        found, models.apply_by_group(mesh, ("i",), models.all_reduce("max"), x, groups)
    )
    assert {m.backend for m in jaxcomm.communicators()} == {"nccl"}
