"""Sizes at which the transport changes its ways, one element more and one less."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

pytestmark = pytest.mark.multiprocess

# As in ffi/backends/host: up to here operands lie beside the counters,
INLINE = 4096
# from here on all-reduces of three processes and more go in two phases,
TWO_PHASE = 32 << 10
# one chunk of a stream,
SLOT = 128 << 10
# and as many of them as may be on their way.
WINDOWS = (4 * SLOT, 8 * SLOT)
# Where two ranks of a process or two processes share what is limited.
HALVES = (INLINE // 2, SLOT // 2)


def counts(dtype, most):
    """Numbers of elements: none, one, odd, around every edge up to a size, and more."""
    width = np.dtype(dtype).itemsize
    edges = [
        edge // width + near
        for edge in (*HALVES, INLINE, TWO_PHASE, SLOT, *WINDOWS)
        if edge <= most
        for near in (-1, 0, 1)
    ]
    return [0, 1, 7, *edges, 3 * most // width + 5]


def operands(here, size, dtype, most, *rows):
    return [
        here.values(jnp.dtype(dtype), (size, *rows, count), count)
        for count in counts(dtype, most)
    ] + ([here.values(jnp.dtype(dtype), (size,), 3)] if not rows else [])


def small(arrays, dtype):
    """Whole numbers, whose sums are exact in any order."""
    return [np.rint(4 * x).astype(jnp.dtype(dtype)) for x in arrays]


def every_size(here, processes, devices, most):
    mesh = here.mesh(processes, devices)
    if mesh is None:
        return
    size, model = mesh.size, here.model
    octets = operands(here, size, "uint8", most)
    halves = operands(here, size, "bfloat16", most)
    whole = small(operands(here, size, "float32", most), "float32")
    rows = operands(here, size, "int16", most // 8, size)
    cases = {
        "psum": (lambda x: jaxcomm.psum(x, "i"), model.all_reduce("sum"), whole),
        "psum bf16": (lambda x: jaxcomm.psum(x, "i"), model.all_reduce("sum"), halves),
        "reduce": (
            lambda x: jaxcomm.preduce(x, "i", 1),
            model.only_on(1, model.all_reduce("sum")),
            whole,
        ),
        "scan": (lambda x: jaxcomm.pscan(x, "i"), model.scan(), halves),
        "ring_shift": (
            lambda x: jaxcomm.ring_shift(x, "i"),
            model.permute(lambda n: [(r, (r + 1) % n) for r in range(n)]),
            octets,
        ),
        "broadcast": (
            lambda x: jaxcomm.pbroadcast(x, "i", 1),
            model.broadcast(1),
            octets,
        ),
        "all_gather": (
            lambda x: jaxcomm.all_gather(x, "i"),
            model.all_gather(),
            octets[:-2],
        ),
        "gather": (
            lambda x: jaxcomm.pgather(x, "i", size - 1),
            model.only_on(size - 1, model.all_gather()),
            octets[:-2],
        ),
        "psum_scatter": (
            lambda x: jaxcomm.psum_scatter(x, "i"),
            model.reduce_scatter(),
            rows,
        ),
        "all_to_all": (
            lambda x: jaxcomm.all_to_all(x, "i", 0, 0, tiled=True),
            model.all_to_all(0, 0, tiled=True),
            rows,
        ),
        "scatter": (lambda x: jaxcomm.pscatter(x, "i", 1), model.scatter(1), rows),
    }

    def program(operands):
        # Each array in a call of its own: leaves of one call share what is limited.
        return {
            name: [call(x) for x in operands[name]]
            for name, (call, *_) in cases.items()
        }

    found = here.run(mesh, program, {name: case[2] for name, case in cases.items()})
    for name, (_, group_model, arrays) in cases.items():
        for result, array in zip(found[name], arrays, strict=True):
            expected = here.by_group(mesh, ("i",), group_model, array)
            here.identical(mesh, result, expected, f"{name}, {array.nbytes // size} B")


@pytest.mark.parametrize(
    ("processes", "devices"), [(2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2)]
)
def test_no_size_is_special(team, processes, devices):
    most = WINDOWS[1] if devices == 1 else SLOT
    team.call(every_size, processes=processes, devices=devices, most=most)


def leaves_of_all_sizes(here, processes, devices):
    mesh = here.mesh(processes, devices)
    if mesh is None:
        return
    size = mesh.size
    x = {
        name: here.values(jnp.dtype(dtype), (size, size, *shape), seed)
        for seed, (name, dtype, shape) in enumerate(
            [
                ("none", "float32", (0,)),
                ("one", "uint8", ()),
                ("few", "int32", (3,)),
                ("odd", "uint8", (4097,)),
                ("many", "bfloat16", (30_001,)),
                ("most", "int32", (100_003,)),
            ]
        )
    }

    def program(x):
        return {
            "psum": jaxcomm.psum(x, "i"),
            "all_gather": jaxcomm.all_gather(x, "i", axis=1),
            "psum_scatter": jaxcomm.psum_scatter(x, "i"),
            "all_to_all": jaxcomm.all_to_all(x, "i", 0, 0, tiled=True),
            "broadcast": jaxcomm.pbroadcast(x, "i", size - 1),
        }

    models = {
        "psum": here.model.all_reduce("sum"),
        "all_gather": here.model.all_gather(1),
        "psum_scatter": here.model.reduce_scatter(),
        "all_to_all": here.model.all_to_all(0, 0, tiled=True),
        "broadcast": here.model.broadcast(size - 1),
    }
    found = here.run(mesh, program, x)
    for name, group_model in models.items():
        for leaf, stacked in x.items():
            expected = here.by_group(mesh, ("i",), group_model, stacked)
            here.identical(mesh, found[name][leaf], expected, f"{name}, {leaf}")


@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (3, 1)])
def test_leaves_of_all_sizes_and_types_travel_in_one_call(team, processes, devices):
    team.call(leaves_of_all_sizes, processes=processes, devices=devices)


def past_the_caches(here, processes, devices):
    """Operations that touch 64 MiB and more are written past the caches."""
    mesh = here.mesh(processes, devices)
    if mesh is None:
        return
    size = mesh.size
    x = here.values(jnp.dtype("int32"), (size, size, (36 << 20) // 4 // size**2 + 3), 1)

    def program(x):
        return {
            "psum": jaxcomm.psum(x, "i"),
            "all_to_all": jaxcomm.all_to_all(x, "i", 0, 0, tiled=True),
            "ring_shift": jaxcomm.ring_shift(x, "i"),
        }

    models = {
        "psum": here.model.all_reduce("sum"),
        "all_to_all": here.model.all_to_all(0, 0, tiled=True),
        "ring_shift": here.model.permute(
            lambda n: [(r, (r + 1) % n) for r in range(n)]
        ),
    }
    found = here.run(mesh, program, x)
    for name, group_model in models.items():
        expected = here.by_group(mesh, ("i",), group_model, x)
        here.identical(mesh, found[name], expected, name)


@pytest.mark.parametrize(("processes", "devices"), [(2, 1), (2, 2), (3, 1)])
def test_what_the_caches_do_not_hold(team, processes, devices):
    team.call(past_the_caches, processes=processes, devices=devices)


def bits_of_sums(here, processes, devices, backend):
    mesh = here.mesh(processes, devices)
    if mesh is None:
        return None
    sums = []
    for count in (1, 1000, 9000, 100_001):
        x = here.values("float32", (mesh.size, count), count)
        found = here.run(mesh, lambda x: jaxcomm.psum(x, "i", backend=backend), x)
        assert (found == found[0]).all()
        sums.append(found[0].tobytes().hex()[-4096:])
    return sums


@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (3, 2), (4, 1)])
def test_all_ranks_get_the_same_bits_of_a_sum(team, processes, devices):
    sums = team.call(bits_of_sums, processes=processes, devices=devices, backend="host")
    assert all(found == sums[0] for found in sums[:processes])
