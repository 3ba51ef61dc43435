"""Zero, odd, unaligned and large shapes, and every dimension to gather or cut along."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm


@pytest.fixture
def mesh(mesh_of):
    return mesh_of((4,), ("i",))


def _numbers(*shape, dtype=np.float32):
    """Distinct small integers, so that a misplaced element shows."""
    return (np.arange(np.prod(shape)) % 8191).reshape(shape).astype(dtype)


def test_scalars_odd_lengths_and_empty_arrays(
    stacked, by_group, identical, model, mesh
):
    shapes = [(), (0,), (1,), (7,), (1023,), (3, 0, 5), (2, 1, 3), (65, 33)]
    x = [_numbers(4, *shape) for shape in shapes]

    def program(x):
        return {
            "psum": jaxcomm.psum(x, "i"),
            "pmax": jaxcomm.pmax(x, "i"),
            "all_gather": jaxcomm.all_gather(x, "i"),
            "gather": jaxcomm.pgather(x, "i", 1),
            "ppermute": jaxcomm.ppermute(x, "i", [(3, 0), (0, 2)]),
            "broadcast": jaxcomm.pbroadcast(x, "i", 2),
            "reduce": jaxcomm.preduce(x, "i", 2),
            "scan": jaxcomm.pscan(x, "i"),
            "scan_exclusive": jaxcomm.pscan(x, "i", exclusive=True, reverse=True),
            "barrier": jaxcomm.pbarrier(x, "i"),
        }

    models = {
        "psum": model.all_reduce("sum"),
        "pmax": model.all_reduce("max"),
        "all_gather": model.all_gather(),
        "gather": model.only_on(1, model.all_gather()),
        "ppermute": model.permute([(3, 0), (0, 2)]),
        "broadcast": model.broadcast(2),
        "reduce": model.only_on(2, model.all_reduce("sum")),
        "scan": model.scan(),
        "scan_exclusive": model.scan(exclusive=True, reverse=True),
        "barrier": lambda group: group,
    }
    found = stacked(mesh, program, x)
    for name, group_model in models.items():
        for i, leaf in enumerate(x):
            identical(found[name][i], by_group(mesh, ("i",), group_model, leaf), name)


def test_empty_dimensions_can_be_cut_and_joined(
    stacked, by_group, identical, model, mesh
):
    x, square = _numbers(4, 0, 3), _numbers(4, 4, 0)

    def program(x, square):
        return {
            "psum_scatter": jaxcomm.psum_scatter(x, "i", tiled=True),
            "all_to_all": jaxcomm.all_to_all(x, "i", 0, 1, tiled=True),
            "all_gather": jaxcomm.all_gather(x, "i", axis=1, tiled=True),
            "scatter": jaxcomm.pscatter(square, "i"),
            "pswapaxes": jaxcomm.pswapaxes(square, "i", 0),
        }

    found = stacked(mesh, program, x, square)
    expected = {
        "psum_scatter": (model.reduce_scatter(0, tiled=True), x),
        "all_to_all": (model.all_to_all(0, 1, tiled=True), x),
        "all_gather": (model.all_gather(1, tiled=True), x),
        "scatter": (model.scatter(), square),
        "pswapaxes": (model.all_to_all(0, 0), square),
    }
    for name, (group_model, operand) in expected.items():
        identical(found[name], by_group(mesh, ("i",), group_model, operand), name)


def test_gathers_along_every_axis(stacked, identical, by_group, model, mesh):
    x = _numbers(4, 3, 2, 5)
    cases = [(a, False) for a in range(-4, 4)] + [(a, True) for a in range(-3, 3)]

    def program(lib):
        return lambda x: [lib.all_gather(x, "i", axis=a, tiled=t) for a, t in cases]

    ours = stacked(mesh, program(jaxcomm), x)
    identical(ours, stacked(mesh, program(jax.lax), x))
    for (axis, tiled), found in zip(cases, ours, strict=True):
        identical(found, by_group(mesh, ("i",), model.all_gather(axis, tiled), x))


def test_sums_and_scatters_along_every_dimension(
    stacked, identical, by_group, model, mesh
):
    tiles, cube = _numbers(4, 8, 4, 12), _numbers(4, 4, 4, 4)

    def program(lib):
        def run(tiles, cube):
            return [
                lib.psum_scatter(tiles, "i", scatter_dimension=d, tiled=True)
                for d in range(-3, 3)
            ] + [lib.psum_scatter(cube, "i", scatter_dimension=d) for d in range(-3, 3)]

        return run

    ours = stacked(mesh, program(jaxcomm), tiles, cube)
    for i, found in enumerate(ours):
        dimension, tiled = i % 6 % 3, i < 6
        operand = tiles if tiled else cube
        rule = model.reduce_scatter(dimension, tiled)
        identical(
            found, by_group(mesh, ("i",), rule, operand), f"dimension {dimension}"
        )
    scatters = stacked(
        mesh,
        lambda x: [
            jaxcomm.pscatter(x, "i", 1, axis=d, tiled=True) for d in range(-3, 3)
        ],
        tiles,
    )
    for i, found in enumerate(scatters):
        identical(found, by_group(mesh, ("i",), model.scatter(1, i % 3, True), tiles))


@pytest.mark.parametrize("tiled", [False, True])
def test_exchanges_between_every_pair_of_dimensions(
    stacked, identical, by_group, model, mesh, tiled
):
    x = _numbers(4, 8, 4, 12) if tiled else _numbers(4, 4, 4, 4)
    pairs = [(s, c) for s in range(3) for c in range(3)] + [(-1, 0), (0, -1), (-2, -2)]

    def program(lib, pairs):
        return lambda x: [lib.all_to_all(x, "i", s, c, tiled=tiled) for s, c in pairs]

    ours = stacked(mesh, program(jaxcomm, pairs), x)
    # jax.lax takes no negative dimensions here.
    identical(ours[:9], stacked(mesh, program(jax.lax, pairs[:9]), x))
    for (split, concat), found in zip(pairs, ours, strict=True):
        rule = model.all_to_all(split % 3, concat % 3, tiled)
        identical(found, by_group(mesh, ("i",), rule, x), f"{split} -> {concat}")


def test_leaves_of_different_rank_count_negative_axes_from_their_own_end(
    stacked, identical, mesh
):
    x = {"flat": _numbers(4, 8), "cube": _numbers(4, 2, 3, 8)}

    def program(x):
        return (
            jaxcomm.all_gather(x, "i", axis=-1),
            jaxcomm.psum_scatter(x, "i", scatter_dimension=-1, tiled=True),
        )

    gathered, scattered = stacked(mesh, program, x)
    identical(gathered["flat"][0], np.moveaxis(x["flat"], 0, -1))
    identical(gathered["cube"][0], np.moveaxis(x["cube"], 0, -1))
    identical(scattered["cube"][1], x["cube"].sum(0)[..., 2:4])


def test_slices_that_start_off_alignment(stacked, by_group, identical, model, mesh):
    """XLA may hand a slice over in place, at any byte of a buffer."""
    x = _numbers(4, 1031, dtype=np.uint8)

    def program(x):
        pieces = [x[1:], x[3:1026], x[5:6], x[7:1000].astype(jnp.bfloat16)]
        return jaxcomm.psum(pieces, "i"), jaxcomm.all_gather(pieces, "i", tiled=True)

    sums, gathered = stacked(mesh, program, x)
    pieces = [x[:, 1:], x[:, 3:1026], x[:, 5:6], x[:, 7:1000].astype(jnp.bfloat16)]
    for i, piece in enumerate(pieces):
        identical(sums[i], by_group(mesh, ("i",), model.all_reduce("sum"), piece))
        identical(gathered[i], by_group(mesh, ("i",), model.all_gather(0, True), piece))


@pytest.mark.host_only(reason="the threads are the host backend's")
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((12, 249, 257), id="2.9 MiB: into the caches"),
        pytest.param((12, 500, 351), id="8.03 MiB: past them"),
    ],
)
def test_megabytes_are_shared_out_between_threads(
    shape, stacked, by_group, identical, model, mesh
):
    """Odd sizes, along contiguous and strided dimensions."""
    x = _numbers(4, *shape)

    def program(x):
        return {
            "psum": jaxcomm.psum(x, "i"),
            "pmax": jaxcomm.pmax(x.astype(jnp.bfloat16), "i"),
            "gather_0": jaxcomm.all_gather(x, "i"),
            "gather_1": jaxcomm.all_gather(x, "i", axis=1, tiled=True),
            "gather_3": jaxcomm.all_gather(x, "i", axis=3),
            "reduce_scatter": jaxcomm.psum_scatter(x, "i", tiled=True),
            "all_to_all": jaxcomm.all_to_all(x, "i", 0, 1, tiled=True),
            "all_to_all_2": jaxcomm.all_to_all(x, "i", 0, 2, tiled=True),
            "ppermute": jaxcomm.ppermute(x, "i", [(0, 1), (1, 2), (2, 0)]),
            "broadcast": jaxcomm.pbroadcast(x, "i", 3),
            "reduce": jaxcomm.preduce(x, "i", 3),
            "root_gather": jaxcomm.pgather(x, "i", 2, axis=1),
            "scatter": jaxcomm.pscatter(x, "i", 3, tiled=True),
            "scan": jaxcomm.pscan(x, "i", exclusive=True),
        }

    models = {
        "psum": model.all_reduce("sum"),
        "gather_0": model.all_gather(),
        "gather_1": model.all_gather(1, True),
        "gather_3": model.all_gather(3),
        "reduce_scatter": model.reduce_scatter(0, True),
        "all_to_all": model.all_to_all(0, 1, True),
        "all_to_all_2": model.all_to_all(0, 2, True),
        "ppermute": model.permute([(0, 1), (1, 2), (2, 0)]),
        "broadcast": model.broadcast(3),
        "reduce": model.only_on(3, model.all_reduce("sum")),
        "root_gather": model.only_on(2, model.all_gather(1)),
        "scatter": model.scatter(3, 0, True),
        "scan": model.scan(exclusive=True),
    }
    found = stacked(mesh, program, x)
    for name, group_model in models.items():
        identical(found[name], by_group(mesh, ("i",), group_model, x), name)
    narrow = by_group(mesh, ("i",), model.all_reduce("max"), x.astype(jnp.bfloat16))
    identical(found["pmax"], narrow, "pmax")


def test_scatter_along_strided_dimensions_of_megabytes(
    stacked, by_group, identical, model, mesh
):
    x = _numbers(4, 251, 8, 301)

    def program(x):
        return (
            jaxcomm.psum_scatter(x, "i", scatter_dimension=1, tiled=True),
            jaxcomm.pscatter(x, "i", 1, axis=1, tiled=True),
            jaxcomm.all_to_all(x, "i", 1, 0, tiled=True),
            jaxcomm.all_to_all(x, "i", 1, 2, tiled=True),
        )

    rules = (
        model.reduce_scatter(1, True),
        model.scatter(1, 1, True),
        model.all_to_all(1, 0, True),
        model.all_to_all(1, 2, True),
    )
    for found, rule in zip(stacked(mesh, program, x), rules, strict=True):
        identical(found, by_group(mesh, ("i",), rule, x))


def test_a_hundred_leaves_travel_together(stacked, by_group, identical, model, mesh):
    x = [_numbers(4, n % 7, 3) + np.float32(n) for n in range(100)]

    def program(x):
        return jaxcomm.psum(x, "i"), jaxcomm.ring_shift(x, "i")

    sums, moved = stacked(mesh, program, x)
    for i, leaf in enumerate(x):
        identical(sums[i], by_group(mesh, ("i",), model.all_reduce("sum"), leaf))
        identical(moved[i], np.roll(leaf, 1, 0))
    assert [c.stats()["calls"] for c in jaxcomm.communicators()] == [
        {"all_reduce": 1, "permute": 1}
    ]
