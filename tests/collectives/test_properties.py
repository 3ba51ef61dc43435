"""Shapes, dtypes and dimensions that nobody thought of."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxcomm

pytestmark = pytest.mark.host_only(
    reason="long; the other files have these collectives over NCCL"
)

SIZE = 3  # divides little, so that strides and remainders are odd
DTYPES = (
    "bool", "int4", "uint8", "int16", "int32", "float8_e4m3fn", "bfloat16", "float16",
    "float32", "complex64",
)  # fmt: skip

# Examples are compiled programs: few, the same in every run, without a deadline.
FEW = settings(max_examples=15, deadline=None, derandomize=True, database=None)

dtypes = st.sampled_from(DTYPES)
shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
seeds = st.integers(0, 2**32 - 1)


@FEW
@given(
    leaves=st.lists(st.tuples(dtypes, shapes, seeds), min_size=1, max_size=4),
    data=st.data(),
)
def test_any_tree_moves_whole(
    stacked, by_group, identical, model, values, mesh_of, leaves, data
):
    mesh = mesh_of((SIZE,), ("i",))
    x = [values(jnp.dtype(d), (SIZE, *shape), seed) for d, shape, seed in leaves]
    root = data.draw(st.integers(0, SIZE - 1))
    targets = data.draw(st.permutations(range(SIZE)))
    count = data.draw(st.integers(0, SIZE))
    perm = list(enumerate(targets))[:count]

    def program(x):
        return (
            jaxcomm.ppermute(x, "i", perm),
            jaxcomm.pbroadcast(x, "i", root),
            jaxcomm.all_gather(x, "i", axis=-1),
            jaxcomm.pgather(x, "i", root),
            jaxcomm.pbarrier(x, "i"),
        )

    rules = (
        model.permute(perm),
        model.broadcast(root),
        model.all_gather(-1),
        model.only_on(root, model.all_gather()),
        lambda group: group,
    )
    for found, rule in zip(stacked(mesh, program, x), rules, strict=True):
        identical(found, [by_group(mesh, ("i",), rule, leaf) for leaf in x])


@FEW
@given(
    leaves=st.lists(st.tuples(dtypes, shapes, seeds), min_size=1, max_size=4),
    op=st.sampled_from(["sum", "max", "min"]),
    root=st.integers(0, SIZE - 1),
    exclusive=st.booleans(),
    reverse=st.booleans(),
)
def test_any_tree_reduces_in_rank_order(
    stacked, by_group, identical, model, values, mesh_of,
    leaves, op, root, exclusive, reverse,
):  # fmt: skip
    mesh = mesh_of((SIZE,), ("i",))
    x = [values(jnp.dtype(d), (SIZE, *shape), seed) for d, shape, seed in leaves]
    call = {"sum": jaxcomm.psum, "max": jaxcomm.pmax, "min": jaxcomm.pmin}[op]

    def program(x):
        return (
            call(x, "i"),
            jaxcomm.preduce(x, "i", root, op=op),
            jaxcomm.pscan(x, "i", op=op, exclusive=exclusive, reverse=reverse),
        )

    rules = (
        model.all_reduce(op),
        model.only_on(root, model.all_reduce(op)),
        model.scan(op, exclusive, reverse),
    )
    for found, rule in zip(stacked(mesh, program, x), rules, strict=True):
        identical(found, [by_group(mesh, ("i",), rule, leaf) for leaf in x])


@FEW
@given(
    dtype=dtypes,
    shape=st.lists(st.integers(0, 5), min_size=2, max_size=4),
    data=st.data(),
    seed=seeds,
)
def test_any_dimensions_can_be_cut_and_joined(
    stacked, by_group, identical, model, values, mesh_of, dtype, shape, data, seed
):
    mesh = mesh_of((SIZE,), ("i",))
    split = data.draw(st.integers(0, len(shape) - 1), "split")
    concat = data.draw(st.integers(0, len(shape) - 1), "concat")
    tiled = data.draw(st.booleans(), "tiled")
    shape[split] = SIZE * shape[split] if tiled else SIZE
    x = values(jnp.dtype(dtype), (SIZE, *shape), seed)

    def program(x):
        return (
            jaxcomm.all_to_all(x, "i", split, concat, tiled=tiled),
            jaxcomm.psum_scatter(x, "i", scatter_dimension=split, tiled=tiled),
            jaxcomm.pscatter(x, "i", 1, axis=split, tiled=tiled),
            jaxcomm.all_gather(x, "i", axis=concat, tiled=tiled),
        )

    rules = (
        model.all_to_all(split, concat, tiled),
        model.reduce_scatter(split, tiled),
        model.scatter(1, split, tiled),
        model.all_gather(concat, tiled),
    )
    for found, rule in zip(stacked(mesh, program, x), rules, strict=True):
        identical(found, by_group(mesh, ("i",), rule, x))


@FEW
@given(
    shape=st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3).filter(
        lambda shape: 1 < math.prod(shape) <= 8
    ),
    data=st.data(),
)
def test_any_mesh_and_any_axes_of_it(
    stacked, by_group, identical, model, mesh_of, shape, data
):
    names = ("a", "b", "c")[: len(shape)]
    axes = data.draw(st.permutations(names), "order")
    axes = tuple(axes[: data.draw(st.integers(1, len(names)), "how many")])
    devices = data.draw(st.permutations(range(8)), "devices")[: math.prod(shape)]
    mesh = mesh_of(shape, names, devices)
    x = np.arange(mesh.size * 2, dtype=np.int32).reshape(mesh.size, 2)

    def program(x):
        return (
            jaxcomm.psum(x, axes),
            jaxcomm.all_gather(x, axes),
            jaxcomm.pscan(x, axes, exclusive=True),
            jaxcomm.ring_shift(x, axes),
        )

    def shift(group):
        return np.roll(group, 1, 0)

    found = stacked(mesh, program, x)
    rules = (model.all_reduce("sum"), model.all_gather(), model.scan(exclusive=True))
    for result, rule in zip(found[:3], rules, strict=True):
        identical(result, by_group(mesh, axes, rule, x))
    identical(found[3], by_group(mesh, axes, shift, x))
