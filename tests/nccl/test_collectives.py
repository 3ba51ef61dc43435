"""Every collective, in every family of dtypes and on every kind of mesh, over NCCL."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

pytestmark = pytest.mark.usefixtures("stand_in")

DTYPES = (
    "float32", "bfloat16", "int16", "bool", "complex64", "float8_e4m3fn", "int32",
)  # fmt: skip

# Shape, names, order of the devices, axes, dtypes.
MESHES = {
    "a line in disorder": ((5,), ("i",), (3, 7, 0, 2, 6), ("i",), DTYPES),
    "columns": ((3, 2), ("a", "b"), None, ("a",), ("bfloat16", "bool")),
    "both axes, the second first": (
        (2, 3), ("a", "b"), (5, 1, 4, 0, 3, 2), ("b", "a"), ("int16", "float32"),
    ),
}  # fmt: skip


def mesh_of(shape, names=("i",), order=None):
    order = range(math.prod(shape)) if order is None else order
    devices = np.array([jax.devices()[i] for i in order]).reshape(shape)
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.sharding.Mesh(devices, names, axis_types=auto)


@pytest.mark.parametrize("case", MESHES)
def test_every_collective_is_its_model(models, every, case):
    shape, names, order, axes, dtypes = MESHES[case]
    mesh = mesh_of(shape, names, order)
    size = math.prod(mesh.shape[axis] for axis in axes)
    x = {
        name: models.random_values(jnp.dtype(name), (mesh.size, size, 2, 3), seed)
        for seed, name in enumerate(dtypes)
    }
    found = models.run_stacked(mesh, lambda x: every.calls(x, axes, size), x)
    for name, model in every.models(models, size).items():
        ranked = sorted(axes, key=names.index) if name in every.PERMUTES else axes
        for dtype, leaf in x.items():
            what = f"{name} of {dtype}"
            expected = models.apply_by_group(mesh, ranked, model, leaf)
            if dtype == "complex64" and "prod" in name:
                # By the use of fused multiply-adds.
                models.assert_near(found[name][dtype], expected, 1e-5, what, 1e-5)
            else:
                models.assert_identical(found[name][dtype], expected, what)
    assert {member.backend for member in jaxcomm.communicators()} == {"nccl"}


def test_index_groups_divide_the_ranks(models):
    mesh = mesh_of((6,))
    groups = [[0, 5], [3, 2], [1, 4]]
    at = {"axis_index_groups": groups}
    x = models.random_values(jnp.dtype("int16"), (6, 2, 4), 0)
    calls = {
        "psum": (lambda x: jaxcomm.psum(x, "i", **at), models.all_reduce("sum")),
        "pmax": (lambda x: jaxcomm.pmax(x, "i", **at), models.all_reduce("max")),
        "pprod": (lambda x: jaxcomm.pprod(x, "i", **at), models.all_reduce("prod")),
        "all_gather": (
            lambda x: jaxcomm.all_gather(x, "i", axis=1, **at),
            models.all_gather(1),
        ),
        "psum_scatter": (
            lambda x: jaxcomm.psum_scatter(
                x, "i", scatter_dimension=1, tiled=True, **at
            ),
            models.reduce_scatter(1, tiled=True),
        ),
        "all_to_all": (
            lambda x: jaxcomm.all_to_all(x, "i", 1, 0, tiled=True, **at),
            models.all_to_all(1, 0, tiled=True),
        ),
    }
    found = models.run_stacked(
        mesh, lambda x: {n: f(x) for n, (f, _) in calls.items()}, x
    )
    for name, (_, model) in calls.items():
        expected = models.apply_by_group(mesh, ("i",), model, x, groups)
        models.assert_identical(found[name], expected, name)


def test_groups_of_unequal_sizes_reduce(models):
    mesh = mesh_of((6,))
    groups = [[2, 0, 5], [1], [3, 4]]
    x = models.random_values(jnp.dtype("bfloat16"), (6, 7), 0)
    found = models.run_stacked(
        mesh, lambda x: jaxcomm.psum(x, "i", axis_index_groups=groups), x
    )
    expected = models.apply_by_group(mesh, ("i",), models.all_reduce("sum"), x, groups)
    models.assert_identical(found, expected)


def test_dimensions_other_than_the_first(models):
    """NCCL knows one layout: what is asked for is transposed around it."""
    mesh = mesh_of((3,))
    x = {
        "float8_e5m2": models.random_values(jnp.dtype("float8_e5m2"), (3, 2, 3, 6), 0),
        "int32": models.random_values(jnp.dtype("int32"), (3, 2, 3, 6), 1),
    }
    model = models
    calls = {
        "all_gather": (
            lambda x: jaxcomm.all_gather(x, "i", axis=2, tiled=True),
            model.all_gather(2, tiled=True),
        ),
        "all_gather at the end": (
            lambda x: jaxcomm.all_gather(x, "i", axis=3),
            model.all_gather(3),
        ),
        "all_to_all": (
            lambda x: jaxcomm.all_to_all(x, "i", 2, 0, tiled=True),
            model.all_to_all(2, 0, tiled=True),
        ),
        "all_to_all untiled": (
            lambda x: jaxcomm.all_to_all(x, "i", 1, 2),
            model.all_to_all(1, 2),
        ),
        "psum_scatter": (
            lambda x: jaxcomm.psum_scatter(x, "i", scatter_dimension=1),
            model.reduce_scatter(1),
        ),
        "psum_scatter tiled": (
            lambda x: jaxcomm.psum_scatter(x, "i", scatter_dimension=2, tiled=True),
            model.reduce_scatter(2, tiled=True),
        ),
        "gather": (
            lambda x: jaxcomm.gather(x, "i", 1, axis=2),
            model.only_on(1, model.all_gather(2)),
        ),
        "scatter": (
            lambda x: jaxcomm.scatter(x, "i", 2, axis=2, tiled=True),
            model.scatter(2, 2, tiled=True),
        ),
    }
    found = models.run_stacked(
        mesh, lambda x: {n: f(x) for n, (f, _) in calls.items()}, x
    )
    for name, (_, group_model) in calls.items():
        for dtype, leaf in x.items():
            expected = models.apply_by_group(mesh, ("i",), group_model, leaf)
            models.assert_identical(found[name][dtype], expected, f"{name} of {dtype}")


def test_arrays_without_elements_beside_others(models, every):
    mesh = mesh_of((2,))
    x = (np.zeros((2, 2, 2, 0), np.float32), np.ones((2, 2, 2, 1), np.int16))
    found = models.run_stacked(mesh, lambda x: every.calls(x, "i", 2), x)
    for name, model in every.models(models, 2).items():
        expected = [models.apply_by_group(mesh, ("i",), model, leaf) for leaf in x]
        models.assert_identical(found[name], expected, name)


def test_ragged_pieces_find_their_places(models):
    mesh = mesh_of((3,))
    sizes = np.array([[2, 0, 1], [1, 3, 0], [0, 2, 2]], np.int32)  # [from][to]
    zeros = np.zeros((3, 1), np.int32)
    sends = np.concatenate([zeros, sizes.cumsum(1)[:, :-1].astype(np.int32)], 1)
    lands = np.concatenate([zeros.T, sizes.cumsum(0)[:-1].astype(np.int32)], 0)
    x = models.random_values(jnp.dtype("bfloat16"), (3, 4), 0)
    into = models.random_values(jnp.dtype("bfloat16"), (3, 6), 1)
    found = models.run_stacked(
        mesh,
        lambda *xs: jaxcomm.ragged_all_to_all(*xs, axis_name="i"),
        x, into, sends, sizes, lands, np.ascontiguousarray(sizes.T),
    )  # fmt: skip
    expected = into.copy()
    for source in range(3):
        for target in range(3):
            begin, size = sends[source, target], sizes[source, target]
            at = lands[source, target]
            expected[target, at : at + size] = x[source, begin : begin + size]
    models.assert_identical(found, expected)


@pytest.mark.parametrize("elements", [600_001, 1])
def test_sums_of_16_bit_floats_are_rounded_once(models, stand_in, elements):
    """Above 1 MiB in two phases, so that the wide sums do not travel."""
    mesh = mesh_of((4,))
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


DIFFERENTIABLE = (
    "psum", "pmean", "all_gather", "psum_scatter", "all_to_all", "ppermute",
    "broadcast", "gather", "scatter", "reduce", "scan",
)  # fmt: skip


def test_gradients_are_those_of_lax(models):
    mesh = mesh_of((3,))
    x = models.random_values(jnp.dtype("float32"), (3, 3, 2, 3), 0)

    def results(x, backend):
        at = {"backend": backend}
        return {
            "psum": jaxcomm.psum(x, "i", **at),
            "pmean": jaxcomm.pmean(x, "i", **at),
            "all_gather": jaxcomm.all_gather(x, "i", axis=1, tiled=True, **at),
            "psum_scatter": jaxcomm.psum_scatter(
                x, "i", scatter_dimension=2, tiled=True, **at
            ),
            "all_to_all": jaxcomm.all_to_all(x, "i", 2, 0, tiled=True, **at),
            "ppermute": jaxcomm.ppermute(x, "i", [(0, 2), (2, 1)], **at),
            "broadcast": jaxcomm.broadcast(x, "i", 1, **at),
            "gather": jaxcomm.gather(x, "i", 2, axis=1, **at),
            "scatter": jaxcomm.scatter(x, "i", 1, **at),
            "reduce": jaxcomm.reduce(x, "i", 1, **at),
            "scan": jaxcomm.scan(x, "i", exclusive=True, **at),
        }

    def gradients(backend):
        def value(x, name):
            result = results(x, backend)[name]
            weights = jnp.cos(jnp.arange(result.size, dtype=result.dtype))
            return (jnp.sin(result) * weights.reshape(result.shape)).sum()

        return models.run_stacked(
            mesh,
            lambda x: {name: jax.grad(value)(x, name) for name in DIFFERENTIABLE},
            x,
        )

    found, expected = gradients("nccl"), gradients("xla")
    for name in DIFFERENTIABLE:
        # Sums of three in another order.
        models.assert_near(found[name], expected[name], 1e-5, name, 1e-6)


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


def test_one_array_is_sent_twice_beside_other_things(stand_in, make_mesh):
    def twice(x):
        moved = []
        for function in jnp.sin, jnp.cos:
            arriving = jaxcomm.ring_shift_start(x, "i")
            other = function(arriving.then(x)) @ x.T
            moved.append(jaxcomm.ring_shift_done(arriving, after=other) + other.sum())
        return moved[0] - moved[1] / 2

    mesh = make_mesh(i=2)
    jaxcomm.init(mesh, "i")
    stand_in.clear()
    x = jnp.arange(8.0).reshape(4, 2)
    split = jax.P("i")
    program = jax.jit(jax.shard_map(twice, mesh=mesh, in_specs=split, out_specs=split))
    one, two = x[:2], x[2:]
    expected = [
        other / 2 + (jnp.sin(own) @ own.T).sum() - (jnp.cos(own) @ own.T).sum() / 2
        for own, other in ((one, two), (two, one))
    ]
    np.testing.assert_allclose(program(x), jnp.concatenate(expected), rtol=1e-5)
    assert len(stand_in.trace("ncclSend")) == 2 * 2


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
