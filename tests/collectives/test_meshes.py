"""Every collective over every shape of mesh, against numpy, XLA and jax.lax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

CASES = {
    "eight in a row": ((8,), ("i",), None, ("i",)),
    "eight, devices permuted": ((8,), ("i",), (3, 7, 0, 2, 6, 4, 1, 5), ("i",)),
    "rows of 2 x 4": ((2, 4), ("a", "b"), None, ("a",)),
    "columns of 2 x 4": ((2, 4), ("a", "b"), None, ("b",)),
    "2 x 4 row-major": ((2, 4), ("a", "b"), None, ("a", "b")),
    "2 x 4 column-major": ((2, 4), ("a", "b"), None, ("b", "a")),
    "2 x 4 column-major, permuted": (
        (2, 4), ("a", "b"), (5, 1, 4, 0, 7, 3, 2, 6), ("b", "a"),
    ),
    "outer and inner of 2 x 2 x 2": ((2, 2, 2), ("a", "b", "c"), None, ("c", "a")),
    "three axes of 2 x 2 x 2": ((2, 2, 2), ("a", "b", "c"), None, ("b", "c", "a")),
    "an axis of one device": ((1, 4), ("one", "b"), None, ("one",)),
    "an axis of one device and another": ((1, 4), ("one", "b"), None, ("b", "one")),
    "three devices": ((3,), ("i",), None, ("i",)),
}  # fmt: skip


def _ring(size):
    return [(rank, (rank + 1) % size) for rank in range(size)]


def _some(size):
    """Most ranks send backwards; the first receives nothing."""
    return [(rank, rank - 1) for rank in range(2, size)]


def _twins(lib, axes, size, permuted_axes=None, **options):
    """What jax.lax has too. Operands: "x" (size, 2, 3) trees, "tiles" (2 size, 3)."""
    shuffle = [*range(1, size), 0]
    along = permuted_axes or axes
    return {
        "psum": lambda x, tiles: lib.psum(x, axes, **options),
        "pmean": lambda x, tiles: lib.pmean(x, axes, **options),
        "pmax": lambda x, tiles: lib.pmax(x, axes, **options),
        "pmin": lambda x, tiles: lib.pmin(x, axes, **options),
        "all_gather": lambda x, tiles: lib.all_gather(x, axes, axis=1, **options),
        "all_gather_tiled": lambda x, tiles: lib.all_gather(
            x, axes, axis=-1, tiled=True, **options
        ),
        "psum_scatter": lambda x, tiles: lib.psum_scatter(x, axes, **options),
        "psum_scatter_tiled": lambda x, tiles: lib.psum_scatter(
            tiles, axes, scatter_dimension=0, tiled=True, **options
        ),
        "all_to_all": lambda x, tiles: lib.all_to_all(x, axes, 0, 2, **options),
        "all_to_all_tiled": lambda x, tiles: lib.all_to_all(
            tiles, axes, 0, 1, tiled=True, **options
        ),
        "pswapaxes": lambda x, tiles: lib.pswapaxes(x, axes, 0, **options),
        "ppermute": lambda x, tiles: lib.ppermute(x, along, _ring(size), **options),
        "ppermute_some": lambda x, tiles: lib.ppermute(
            x, along, _some(size), **options
        ),
        "pshuffle": lambda x, tiles: lib.pshuffle(x, along, shuffle, **options),
    }


def _beyond(axes, size, backend):
    """What jax.lax has not, with the same operands."""
    root = size - 1
    options = {"backend": backend}
    return {
        "pprod": lambda x, tiles: jaxcomm.pprod(x, axes, **options),
        "broadcast": lambda x, tiles: jaxcomm.pbroadcast(x, axes, root, **options),
        "pbroadcast": lambda x, tiles: jaxcomm.pbroadcast(x, axes, 0, **options),
        "reduce": lambda x, tiles: jaxcomm.preduce(x, axes, root, **options),
        "reduce_max": lambda x, tiles: jaxcomm.preduce(x, axes, 0, op="max", **options),
        "gather": lambda x, tiles: jaxcomm.pgather(x, axes, root, axis=1, **options),
        "gather_tiled": lambda x, tiles: jaxcomm.pgather(
            tiles, axes, axis=1, tiled=True, **options
        ),
        "scatter": lambda x, tiles: jaxcomm.pscatter(x, axes, root, **options),
        "scatter_tiled": lambda x, tiles: jaxcomm.pscatter(
            tiles, axes, tiled=True, **options
        ),
        "scan": lambda x, tiles: jaxcomm.pscan(x, axes, **options),
        "scan_exclusive": lambda x, tiles: jaxcomm.pscan(
            x, axes, exclusive=True, **options
        ),
        "scan_min_reverse": lambda x, tiles: jaxcomm.pscan(
            x, axes, op="min", exclusive=True, reverse=True, **options
        ),
        "ring_shift": lambda x, tiles: jaxcomm.ring_shift(x, axes, -3, **options),
        "barrier": lambda x, tiles: jaxcomm.pbarrier(x, axes, **options),
    }


def _models(model, size):
    """The numpy model of each and the operand it takes; pmean is left to jax.lax."""
    root = size - 1
    shuffle = [*range(1, size), 0]
    back3 = [(rank, (rank - 3) % size) for rank in range(size)]
    return {
        "psum": (model.all_reduce("sum"), "x"),
        "pmax": (model.all_reduce("max"), "x"),
        "pmin": (model.all_reduce("min"), "x"),
        "all_gather": (model.all_gather(1), "x"),
        "all_gather_tiled": (model.all_gather(2, tiled=True), "x"),
        "psum_scatter": (model.reduce_scatter(), "x"),
        "psum_scatter_tiled": (model.reduce_scatter(0, tiled=True), "tiles"),
        "all_to_all": (model.all_to_all(0, 2), "x"),
        "all_to_all_tiled": (model.all_to_all(0, 1, tiled=True), "tiles"),
        "pswapaxes": (model.all_to_all(0, 0), "x"),
        "ppermute": (model.permute(_ring), "x"),
        "ppermute_some": (model.permute(_some), "x"),
        "pshuffle": (model.permute([(s, t) for t, s in enumerate(shuffle)]), "x"),
        "pprod": (model.all_reduce("prod"), "x"),
        "broadcast": (model.broadcast(root), "x"),
        "pbroadcast": (model.broadcast(0), "x"),
        "reduce": (model.only_on(root, model.all_reduce("sum")), "x"),
        "reduce_max": (model.only_on(0, model.all_reduce("max")), "x"),
        "gather": (model.only_on(root, model.all_gather(1)), "x"),
        "gather_tiled": (model.only_on(0, model.all_gather(1, tiled=True)), "tiles"),
        "scatter": (model.scatter(root), "x"),
        "scatter_tiled": (model.scatter(0, 0, tiled=True), "tiles"),
        "scan": (model.scan(), "x"),
        "scan_exclusive": (model.scan(exclusive=True), "x"),
        "scan_min_reverse": (model.scan("min", exclusive=True, reverse=True), "x"),
        "ring_shift": (model.permute(back3), "x"),
        "barrier": (lambda group: group, "x"),
    }


PERMUTES = ("ppermute", "ppermute_some", "pshuffle")


# Without varying types, and through XLA, a few meshes show all there is to go wrong.
ALSO_UNTYPED = ("eight, devices permuted", "2 x 4 column-major, permuted")
ALSO_IN_XLA = ("eight in a row", "2 x 4 column-major, permuted")


@pytest.mark.parametrize(
    ("case", "check_vma"),
    [(case, True) for case in CASES] + [(case, False) for case in ALSO_UNTYPED],
)
def test_every_collective_is_its_model_and_its_twin(
    stacked, by_group, identical, model, mesh_of, case, check_vma
):
    shape, names, devices, axes = CASES[case]
    mesh = mesh_of(shape, names, devices)
    size = int(np.prod([mesh.shape[axis] for axis in axes]))
    rng = np.random.default_rng(0)

    # Small integers in every type: sums and products are exact in any order.
    def small(*dims):
        integers = rng.integers(-3, 4, (mesh.size, *dims))
        return {"f": integers.astype(np.float32), "i": integers.astype(np.int32)}

    x, tiles = small(size, 2, 3), small(2 * size, 3)

    host = _twins(jaxcomm, axes, size) | _beyond(axes, size, None)
    in_xla = _twins(jaxcomm, axes, size, backend="xla") | _beyond(axes, size, "xla")
    # Later jax.lax refuses to permute along axes in another order than the mesh's.
    in_order = tuple(sorted(axes, key=names.index))
    any_order = jax.__version_info__ < (0, 11)
    twins = _twins(jax.lax, axes, size, axes if any_order else in_order)

    def run(*families):
        def program(x, tiles):
            return [
                {n: call(x, tiles) for n, call in calls.items()} for calls in families
            ]

        results = stacked(mesh, program, x, tiles, check_vma=check_vma)
        return jax.tree.map(np.asarray, results)

    (ours,) = run(host)
    (xla,) = run(in_xla) if case in ALSO_IN_XLA else ({},)
    (lax,) = run(twins)
    for name, expected in lax.items():
        identical(ours[name], expected, f"{name} against jax.lax")
    for name, (group_model, operand) in _models(model, size).items():
        # Permutations number the devices in the mesh's order of axes.
        ranked = sorted(axes, key=names.index) if name in PERMUTES else axes
        expected = jax.tree.map(
            lambda leaf: by_group(mesh, ranked, group_model, leaf),  # noqa: B023
            x if operand == "x" else tiles,
        )
        identical(ours[name], expected, f"{name} against numpy")
    for name, found in xla.items():
        identical(found, ours[name], f"{name}, backend xla against host")


@pytest.mark.parametrize("check_vma", [True, False])
def test_index_groups_divide_the_axis(
    stacked, by_group, identical, model, mesh_of, check_vma
):
    mesh = mesh_of((8,), ("i",))
    equal = [[0, 5], [7, 2], [1, 3], [6, 4]]
    unequal = [[2, 0, 5], [1], [7, 6, 4, 3]]
    x = np.random.default_rng(1).integers(-9, 9, (8, 2, 6)).astype(np.float32)

    def calls(lib, **options):
        pair = {"axis_index_groups": equal, **options}
        return {
            "psum": lambda x: lib.psum(x, "i", **pair),
            "pmean": lambda x: lib.pmean(x, "i", **pair),
            "pmax": lambda x: lib.pmax(x, "i", **pair),
            "pmin": lambda x: lib.pmin(x, "i", **pair),
            "all_gather": lambda x: lib.all_gather(x, "i", axis=1, **pair),
            "psum_scatter": lambda x: lib.psum_scatter(x, "i", **pair),
            "all_to_all": lambda x: lib.all_to_all(x, "i", 1, 0, tiled=True, **pair),
            "pswapaxes": lambda x: lib.pswapaxes(x, "i", 0, **pair),
        }

    ours_only = {
        "pprod": lambda x: jaxcomm.pprod(x, "i", axis_index_groups=equal),
        "psum, unequal": lambda x: jaxcomm.psum(x, "i", axis_index_groups=unequal),
        "pmax, unequal": lambda x: jaxcomm.pmax(x, "i", axis_index_groups=unequal),
    }
    models = {
        "psum": (model.all_reduce("sum"), equal),
        "pmax": (model.all_reduce("max"), equal),
        "pmin": (model.all_reduce("min"), equal),
        "pprod": (model.all_reduce("prod"), equal),
        "all_gather": (model.all_gather(1), equal),
        "psum_scatter": (model.reduce_scatter(), equal),
        "all_to_all": (model.all_to_all(1, 0, tiled=True), equal),
        "pswapaxes": (model.all_to_all(0, 0), equal),
        "psum, unequal": (model.all_reduce("sum"), unequal),
        "pmax, unequal": (model.all_reduce("max"), unequal),
    }
    # jax.lax refuses index groups in some collectives under check_vma.
    twins = calls(jax.lax) if not check_vma else {}

    def run(*families):
        def program(x):
            return [{n: call(x) for n, call in calls.items()} for calls in families]

        return stacked(mesh, program, x, check_vma=check_vma)

    (ours,) = run(calls(jaxcomm) | ours_only)
    xla, lax = run(calls(jaxcomm, backend="xla"), twins)
    for name, (group_model, groups) in models.items():
        identical(
            ours[name], by_group(mesh, ("i",), group_model, x, groups), f"{name}, numpy"
        )
    for name in lax:
        identical(ours[name], lax[name], f"{name} against jax.lax")
    for name in xla:
        identical(xla[name], ours[name], f"{name}, backend xla against host")
    pairs = by_group(mesh, ("i",), lambda g: np.stack([g.mean(0)] * 2), x, equal)
    identical(ours["pmean"], pairs, "pmean")


def test_a_product_within_index_groups_works_without_types(
    stacked, by_group, identical, model, mesh_of
):
    mesh = mesh_of((2, 4), ("a", "b"))
    groups = [[0, 1, 7], [2, 3, 4, 5, 6]]
    x = np.random.default_rng(1).integers(-2, 3, (8, 3)).astype(np.int32)
    found = stacked(
        mesh, lambda x: jaxcomm.pprod(x, ("b", "a"), axis_index_groups=groups), x
    )
    expected = by_group(mesh, ("b", "a"), model.all_reduce("prod"), x, groups)
    identical(found, expected)


def test_trees_of_any_form_keep_it(stacked, mesh_of):
    mesh = mesh_of((4,), ("i",))
    x = np.arange(8.0, dtype=np.float32).reshape(4, 2)

    def program(x):
        tree = {"a": (x, None), "b": [x.astype(jnp.int32), {}], "c": ()}
        results = [
            jaxcomm.psum(tree, "i"),
            jaxcomm.all_gather(tree, "i", axis=-1),
            jaxcomm.ring_shift(tree, "i"),
            jaxcomm.pscan(tree, "i"),
            jaxcomm.pbarrier(tree, "i"),
            jaxcomm.pbroadcast(tree, "i", 0),
        ]
        for result in results:
            assert jax.tree.structure(result) == jax.tree.structure(tree)
        return results

    found = stacked(mesh, program, x)
    np.testing.assert_array_equal(found[0]["a"][0], np.tile(x.sum(0), (4, 1)))
    np.testing.assert_array_equal(found[2]["b"][0], np.roll(x, 1, 0).astype(np.int32))


def test_an_empty_tree_comes_back_and_makes_no_communicator(stacked, mesh_of):
    mesh = mesh_of((4,), ("i",))

    def program(x):
        for empty in ({}, (), None, {"a": None}):
            assert jaxcomm.psum(empty, "i") == empty
            assert jaxcomm.all_gather(empty, "i") == empty
            assert jaxcomm.ppermute(empty, "i", [(0, 1)]) == empty
            assert jaxcomm.pbarrier(empty, "i") == empty
        return x

    stacked(mesh, program, np.zeros((4, 1), np.float32))
    assert len(jaxcomm.communicators()) == 0


def test_no_axes_mean_no_communication(stacked, mesh_of):
    mesh = mesh_of((4,), ("i",))
    x = np.arange(4.0, dtype=np.float32)

    def program(x):
        return jaxcomm.psum(x, ()), jaxcomm.pmax(x, ()), jaxcomm.all_gather(x, ())

    for found in stacked(mesh, program, x):
        np.testing.assert_array_equal(found, x)


def test_integers_among_the_axes_are_dimensions(stacked, identical, mesh_of):
    mesh = mesh_of((4,), ("i",))
    x = np.arange(24.0, dtype=np.float32).reshape(4, 2, 3)

    def calls(lib):
        return lambda x: (lib.psum(x, ("i", 1)), lib.pmax(x, (0, "i")))

    ours = stacked(mesh, calls(jaxcomm), x)
    # jax.lax takes them without varying types only.
    identical(ours, stacked(mesh, calls(jax.lax), x, check_vma=False))


def test_the_sum_of_one_is_the_axis_size_and_a_python_number(stacked, mesh_of):
    mesh = mesh_of((2, 4), ("a", "b"))

    def program(x):
        assert jaxcomm.psum(1, "b") == 4
        assert isinstance(jaxcomm.psum(1, ("a", "b")), int)
        return x + jaxcomm.psum(1, ("a", "b"))

    found = stacked(mesh, program, np.zeros((8, 1), np.float32))
    np.testing.assert_array_equal(found, np.full((8, 1), 8.0, np.float32))
