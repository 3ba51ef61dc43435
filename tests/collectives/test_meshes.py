"""Every collective over every shape of mesh, against numpy, XLA and jax.lax."""

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

GRID = (2, 4), ("a", "b")
CUBE = (2, 2, 2), ("a", "b", "c")
CROSSED = (5, 1, 4, 0, 7, 3, 2, 6)
CASES = {
    "columns of 2 x 4": (*GRID, None, ("b",)),
    "outer and inner of 2 x 2 x 2": (*CUBE, None, ("c", "a")),
    "three axes of 2 x 2 x 2": (*CUBE, None, ("b", "c", "a")),
    "an axis of one device": ((1, 4), ("one", "b"), None, ("one",)),
    "an axis of one device and another": ((1, 4), ("one", "b"), None, ("b", "one")),
    "eight, devices permuted": ((8,), ("i",), (3, 7, 0, 2, 6, 4, 1, 5), ("i",)),
    "2 x 4 column-major, permuted": (*GRID, CROSSED, ("b", "a")),
    "three devices": ((3,), ("i",), None, ("i",)),
}
# Beside NCCL, without varying types, through XLA and with jax.lax these show all there
# is to go wrong.
COMPARED = ("2 x 4 column-major, permuted", "three devices")
alike = pytest.mark.host_only(reason="arguments are read before there is a backend")


@pytest.mark.parametrize(
    ("case", "check_vma"),
    [
        *(pytest.param(case, True, marks=alike) for case in [*CASES][:-2]),
        pytest.param("eight, devices permuted", False, marks=alike),
        *((case, True) for case in COMPARED),
        (COMPARED[0], False),
    ],
)
def test_every_collective_is_its_model_and_its_twin(
    stacked, by_group, identical, near, mesh_of, case, check_vma, default_backend
):
    shape, names, devices, axes = CASES[case]
    mesh = mesh_of(shape, names, devices)
    size = int(np.prod([mesh.shape[axis] for axis in axes]))
    choice = catalogue.fixed(size)
    rng = np.random.default_rng(0)
    # Small integers in every type: sums and products are exact in any order.
    integers = rng.integers(-3, 4, (mesh.size, size, 2 * size))
    x = {"f": integers.astype(np.float32), "i": integers.astype(np.int32)}

    def run(lib, axes_of, **options):
        def program(x):
            return {
                each.name: each(lib, x, axes_of(each), choice, **options)
                for each in catalogue.CASES.values()
                if each.twin or lib is jaxcomm
            }

        results = stacked(mesh, program, x, check_vma=check_vma)
        return jax.tree.map(np.asarray, results)

    in_order = tuple(sorted(axes, key=names.index))

    def of_lax(each):
        # Later jax.lax refuses to permute along axes in another order than the mesh's.
        late = jax.__version_info__ >= (0, 11)
        return in_order if late and each.in_mesh_order else axes

    ours = run(jaxcomm, lambda each: axes)
    for name, each in catalogue.CASES.items():
        ranked = in_order if each.in_mesh_order else axes
        expected = jax.tree.map(
            lambda leaf: by_group(mesh, ranked, each.model(choice), leaf),  # noqa: B023
            x,
        )
        if each.kind == "mean":
            # XLA multiplies by one over 3.
            near(ours[name], expected, 2e-7, f"{name} against numpy")
        else:
            identical(ours[name], expected, f"{name} against numpy")
    if case in COMPARED and default_backend == "host":
        for name, expected in run(jax.lax, of_lax).items():
            identical(ours[name], expected, f"{name} against jax.lax")
        for name, found in run(jaxcomm, lambda each: axes, backend="xla").items():
            identical(found, ours[name], f"{name}, backend xla against host")


@pytest.mark.parametrize("check_vma", [pytest.param(True, marks=alike), False])
def test_index_groups_divide_the_axis(stacked, by_group, identical, mesh_of, check_vma):
    mesh = mesh_of((8,), ("i",))
    equal = [[0, 5], [7, 2], [1, 3], [6, 4]]
    unequal = [[2, 0, 5], [1], [7, 6, 4, 3]]
    x = np.random.default_rng(1).integers(-9, 9, (8, 2, 6)).astype(np.float32)
    choice = catalogue.fixed(2)
    grouped = [each for each in catalogue.CASES.values() if each.takes_groups]
    of_any_size = [each for each in grouped if each.target == "all_reduce"]

    def run(lib, cases, groups, **options):
        def program(x):
            at = {"axis_index_groups": groups, **options}
            return {each.name: each(lib, x, "i", choice, **at) for each in cases}

        return stacked(mesh, program, x, check_vma=check_vma)

    for cases, groups in ((grouped, equal), (of_any_size, unequal)):
        ours = run(jaxcomm, cases, groups)
        for each in cases:
            expected = by_group(mesh, ("i",), each.model(choice), x, groups)
            if each.kind == "mean" and groups is unequal:
                continue  # jax.lax divides by the size of the first group
            identical(ours[each.name], expected, f"{each.name}, numpy")
    ours = run(jaxcomm, grouped, equal)
    if check_vma:
        return
    for name, found in run(jaxcomm, grouped, equal, backend="xla").items():
        identical(found, ours[name], f"{name}, backend xla against host")
    # jax.lax refuses index groups in some collectives under check_vma.
    twins = [each for each in grouped if each.twin]
    for name, expected in run(jax.lax, twins, equal).items():
        identical(ours[name], expected, f"{name} against jax.lax")


@alike
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


@alike
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


@alike
def test_no_axes_mean_no_communication(stacked, mesh_of):
    mesh = mesh_of((4,), ("i",))
    x = np.arange(4.0, dtype=np.float32)

    def program(x):
        return (
            jaxcomm.psum(x, ()),
            jaxcomm.pmax(x, ()),
            jaxcomm.all_gather(x, ()),
            jaxcomm.psum_scatter(x, ()),
            jaxcomm.all_to_all(x, (), 0, 0),
        )

    for found in stacked(mesh, program, x):
        np.testing.assert_array_equal(found, x)


@alike
def test_integers_among_the_axes_are_dimensions(stacked, identical, mesh_of):
    mesh = mesh_of((4,), ("i",))
    x = np.arange(24.0, dtype=np.float32).reshape(4, 2, 3)

    def calls(lib):
        return lambda x: (lib.psum(x, ("i", 1)), lib.pmax(x, (0, "i")))

    ours = stacked(mesh, calls(jaxcomm), x)
    # jax.lax takes them without varying types only.
    identical(ours, stacked(mesh, calls(jax.lax), x, check_vma=False))


@alike
def test_the_sum_of_one_is_the_axis_size_and_a_python_number(stacked, mesh_of):
    mesh = mesh_of((2, 4), ("a", "b"))

    def program(x):
        assert jaxcomm.psum(1, "b") == 4
        assert isinstance(jaxcomm.psum(1, ("a", "b")), int)
        return x + jaxcomm.psum(1, ("a", "b"))

    found = stacked(mesh, program, np.zeros((8, 1), np.float32))
    np.testing.assert_array_equal(found, np.full((8, 1), 8.0, np.float32))
