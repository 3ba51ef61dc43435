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


@alike
def test_every_public_collective_has_a_case():
    found = {
        name
        for name in jaxcomm.__all__
        if getattr(getattr(jaxcomm, name), "__module__", "").startswith(
            "jaxcomm.collectives."
        )
    }
    assert {"psum", "pbarrier", "psum_start"} <= found
    starts = {f"{n}_start" for n, case in catalogue.FUNCTIONS.items() if case.starts}
    # It is called outside of programs.
    assert found - {"grow"} == set(catalogue.FUNCTIONS) | starts


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
    in_order = tuple(sorted(axes, key=names.index))
    # Later jax.lax refuses to permute along axes in another order than the mesh's.
    late = jax.__version_info__ >= (0, 11)

    def run(lib, **options):
        def program(x):
            return {
                name: each(
                    lib, x, in_order if sorts and each.in_mesh_order else axes, choice,
                    **options,
                )
                for name, each in catalogue.CASES.items()
                if each.twin or lib is jaxcomm
            }  # fmt: skip

        sorts = late and lib is jax.lax
        results = stacked(mesh, program, x, check_vma=check_vma)
        return jax.tree.map(np.asarray, results)

    ours = run(jaxcomm)
    for name, each in catalogue.CASES.items():
        ranked = in_order if each.in_mesh_order else axes
        model = each.model(choice)
        expected = {n: by_group(mesh, ranked, model, leaf) for n, leaf in x.items()}
        if each.kind == "mean":
            # XLA multiplies by one over 3.
            near(ours[name], expected, 2e-7, f"{name} against numpy")
        else:
            identical(ours[name], expected, f"{name} against numpy")
    if case in COMPARED and default_backend == "host":
        for what, others in (
            ("jax.lax", run(jax.lax)),
            ("backend xla", run(jaxcomm, backend="xla")),
        ):
            for name, expected in others.items():
                identical(ours[name], expected, f"{name} against {what}")


@pytest.mark.parametrize("check_vma", [pytest.param(True, marks=alike), False])
def test_index_groups_divide_the_axis(stacked, by_group, identical, mesh_of, check_vma):
    mesh = mesh_of((8,), ("i",))
    equal = [[0, 5], [7, 2], [1, 3], [6, 4]]
    unequal = [[2, 0, 5], [1], [7, 6, 4, 3]]
    x = np.random.default_rng(1).integers(-9, 9, (8, 2, 6)).astype(np.float32)
    choice = catalogue.fixed(2)
    grouped = [each for each in catalogue.CASES.values() if each.takes_groups]

    def run(lib, cases, groups, **options):
        def program(x):
            at = {"axis_index_groups": groups, **options}
            found = {each.name: each(lib, x, "i", choice, **at) for each in cases}
            if groups is unequal:
                found["ranks"] = lib.psum(1, "i", **at)
            return found

        return stacked(mesh, program, x, check_vma=check_vma)

    # jax.lax divides a mean by the size of the first group.
    of_any_size = [c for c in grouped if c.target == "all_reduce" and c.kind != "mean"]
    for cases, groups in ((of_any_size, unequal), (grouped, equal)):
        ours = run(jaxcomm, cases, groups)
        for each in cases:
            expected = by_group(mesh, ("i",), each.model(choice), x, groups)
            identical(ours[each.name], expected, f"{each.name}, numpy")
        if groups is unequal:
            np.testing.assert_array_equal(ours["ranks"], [3, 1, 3, 4, 4, 3, 4, 4])
    if check_vma:
        return  # jax.lax refuses index groups in some collectives.
    twins = [each for each in grouped if each.twin]
    for what, others in (
        ("jax.lax", run(jax.lax, twins, equal)),
        ("backend xla", run(jaxcomm, grouped, equal, backend="xla")),
    ):
        for name, expected in others.items():
            identical(ours[name], expected, f"{name} against {what}")


@alike
def test_trees_of_any_form_keep_it_and_empty_ones_make_no_communicator(stacked, mesh):
    calls = [
        lambda tree: jaxcomm.psum(tree, "i"),
        lambda tree: jaxcomm.ring_shift(tree, "i"),
        lambda tree: jaxcomm.all_gather(tree, "i", axis=-1),
        lambda tree: jaxcomm.pscan(tree, "i"),
        lambda tree: jaxcomm.pbarrier(tree, "i"),
        lambda tree: jaxcomm.pbroadcast(tree, "i", 0),
    ]
    x = np.arange(8.0, dtype=np.float32).reshape(4, 2)

    def empty(x):
        for tree in ({}, (), None, {"a": None}):
            assert [call(tree) for call in calls] == [tree] * len(calls)
        return x

    stacked(mesh, empty, x)
    assert len(jaxcomm.communicators()) == 0

    def program(x):
        tree = {"a": (x, None), "b": [x.astype(jnp.int32), {}], "c": ()}
        results = [call(tree) for call in calls]
        for result in results:
            assert jax.tree.structure(result) == jax.tree.structure(tree)
        return results

    total, turned, *_ = stacked(mesh, program, x)
    np.testing.assert_array_equal(total["a"][0], np.tile(x.sum(0), (4, 1)))
    np.testing.assert_array_equal(turned["b"][0], np.roll(x, 1, 0).astype(np.int32))


@alike
def test_axes_may_be_none_dimensions_and_of_one(stacked, identical, mesh):
    x = np.arange(24.0, dtype=np.float32).reshape(4, 2, 3)

    def over_none(x):
        assert jaxcomm.psum(1, "i") == 4
        assert isinstance(jaxcomm.psum(1, ("i",)), int)
        return (
            jaxcomm.psum(x, ()),
            jaxcomm.pmax(x, ()),
            jaxcomm.all_gather(x, ()),
            jaxcomm.psum_scatter(x, ()),
            jaxcomm.all_to_all(x, (), 0, 0),
        )

    identical(stacked(mesh, over_none, x), (x,) * 5)

    def over_dimensions(lib):
        return lambda x: (lib.psum(x, ("i", 1)), lib.pmax(x, (0, "i")))

    for leaf in (x, x.astype(np.int8)):
        ours = stacked(mesh, over_dimensions(jaxcomm), leaf)
        # jax.lax takes them without varying types only.
        identical(ours, stacked(mesh, over_dimensions(jax.lax), leaf, check_vma=False))
    # And no mean over dimensions, which raises there.
    mean = stacked(mesh, lambda x: jaxcomm.pmean(x, ("i", -1)), x)
    np.testing.assert_array_equal(mean, np.tile(x.mean((0, 2)), (4, 1)))
