"""Programs over stacked operands, and what they should give according to numpy.

A stacked array holds the operands, or results, of all devices along axis 0 in the
order of the mesh. A model is a numpy function from the stacked operands of one
group, in rank order, to its stacked results.

Every test runs over the host backend, then over NCCL, for which the stand-in stands in.
"""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxcomm
from jaxcomm.communicator.backends.nccl import library

UFUNCS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
NARROW_FLOATS = ("bfloat16", "float16", "float8_", "float6_", "float4_")
NARROW_INTEGERS = ("int4", "uint4", "int2", "uint2")


def run_stacked(mesh, function, *stacked, check_vma=True, jit=True, options=None):
    """Runs ``function`` on every device's operands and stacks the results.

    Compiled with XLA's options, unless ``jit`` is False.
    """
    everywhere = jax.P(tuple(mesh.axis_names))

    def local(*operands):
        results = function(*jax.tree.map(lambda x: x[0], operands))
        return jax.tree.map(lambda x: jnp.asarray(x)[None], results)

    program = jax.shard_map(
        local, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=check_vma
    )
    if jit:
        program = jax.jit(program, compiler_options=options)
    return program(*stacked)


def apply_by_group(mesh, axes, model, stacked, index_groups=None):
    """Applies a numpy model to each group of devices over ``axes``."""
    stacked = np.asarray(stacked)
    grid = mesh.devices.shape
    places = [mesh.axis_names.index(axis) for axis in axes]
    order = places + [place for place in range(len(grid)) if place not in places]
    size = math.prod(grid[place] for place in places)
    flat = np.arange(math.prod(grid)).reshape(grid).transpose(order).reshape(size, -1)
    groups = [
        flat[list(indices), column]
        for column in range(flat.shape[1])
        for indices in (index_groups or [range(size)])
    ]
    results = {}
    for group in groups:
        for device, result in zip(group, model(stacked[group]), strict=True):
            results[int(device)] = result
    return np.stack([results[device] for device in range(len(results))])


def wide(x):
    """Returns the operands in the type in which the collectives accumulate."""
    if x.dtype.name.startswith(NARROW_FLOATS):
        return x.astype(np.float32)
    if x.dtype.name in NARROW_INTEGERS:
        return x.astype(np.int32)
    return x


def fold(group, op):
    """Reduces in rank order, in the wide type, and rounds once."""
    if group.dtype == np.bool_ and op in ("sum", "prod"):
        group = group.astype(np.int32)
    with np.errstate(all="ignore"):
        values = wide(group)
        total = values[0]
        for value in values[1:]:
            total = UFUNCS[op](total, value)
        return np.asarray(total).astype(group.dtype)


def identity_of(op, dtype):
    dtype = np.dtype(dtype)
    if op in ("sum", "prod"):
        return np.asarray(op == "prod").astype(dtype)
    least = op == "max"
    if dtype == np.bool_:
        return np.asarray(not least)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return np.asarray(info.min if least else info.max, dtype)
    if dtype.kind == "c":
        return np.asarray(
            complex(-np.inf, -np.inf) if least else complex(np.inf, np.inf), dtype
        )
    if dtype.itemsize == 1:  # not all of these have infinities
        codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
        extreme = np.nanmin(codes) if least else np.nanmax(codes)
        return np.asarray(extreme).astype(dtype)
    return np.asarray(-np.inf if least else np.inf).astype(dtype)


def all_reduce(op):
    return lambda group: np.stack([fold(group, op)] * len(group))


def all_gather(axis=0, tiled=False):
    def model(group):
        put = np.concatenate if tiled else np.stack
        return np.stack([put(list(group), axis)] * len(group))

    return model


def cut(x, size, axis, tiled):
    parts = np.stack(np.split(x, size, axis))
    return parts if tiled else np.squeeze(parts, axis + 1)


def reduce_scatter(axis=0, tiled=False):
    return lambda group: cut(fold(group, "sum"), len(group), axis, tiled)


def all_to_all(split, concat, tiled=False):
    def model(group):
        size = len(group)
        pieces = [cut(x, size, split, tiled) for x in group]  # [source][target]
        put = np.concatenate if tiled else np.stack
        return np.stack(
            [put([pieces[s][t] for s in range(size)], concat) for t in range(size)]
        )

    return model


def permute(perm):
    def model(group):
        out = np.zeros_like(group)
        for source, target in perm(len(group)) if callable(perm) else perm:
            out[target] = group[source]
        return out

    return model


def broadcast(root=0):
    return lambda group: np.stack([group[root]] * len(group))


def only_on(root, model):
    def masked(group):
        every = model(group)
        out = np.zeros_like(every)
        out[root] = every[root]
        return out

    return masked


def scatter(root=0, axis=0, tiled=False):
    return lambda group: cut(group[root], len(group), axis, tiled)


def scan(op="sum", exclusive=False, reverse=False):
    def model(group):
        size = len(group)
        if group.dtype == np.bool_ and op in ("sum", "prod"):
            group = group.astype(np.int32)
        outs = []
        for rank in range(size):
            before = list(range(size - 1, rank, -1) if reverse else range(rank))
            seen = before if exclusive else [*before, rank]
            if seen:
                outs.append(fold(group[seen], op))
            else:
                start = identity_of(op, group.dtype)
                outs.append(np.full(group.shape[1:], start, group.dtype))
        return np.stack(outs)

    return model


def assert_identical(found, expected, what=""):
    """Asserts equal trees: dtypes, shapes and bits; any NaN equals any other."""
    found, expected = jax.tree.flatten(found)[0], jax.tree.flatten(expected)[0]
    assert len(found) == len(expected), what
    for a, b in zip(found, expected, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        where = f"{what} {b.dtype}{list(b.shape)}"
        assert (a.dtype, a.shape) == (b.dtype, b.shape), (where, a.dtype, a.shape)
        if a.dtype.name in NARROW_INTEGERS or a.dtype.kind in "biu":
            np.testing.assert_array_equal(wide(a), wide(b), err_msg=where)
            continue
        if a.dtype.kind == "c":
            assert_identical((a.real, a.imag), (b.real, b.imag), what)
            continue
        bits = np.dtype(f"u{a.dtype.itemsize}")
        a_bits, b_bits = (np.ascontiguousarray(x).view(bits) for x in (a, b))
        wrong = a_bits != b_bits
        if not wrong.any():
            continue
        with np.errstate(all="ignore"):
            both_nan = np.isnan(a.astype(np.float64)) & np.isnan(b.astype(np.float64))
        wrong &= ~both_nan
        assert not wrong.any(), (where, a[wrong][:8], b[wrong][:8])


def assert_near(found, expected, rtol, what="", atol=0.0):
    """Asserts close trees of floats; the caller says why so close and no closer."""
    found, expected = jax.tree.flatten(found)[0], jax.tree.flatten(expected)[0]
    assert len(found) == len(expected), what
    for a, b in zip(found, expected, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), what
        kind = np.complex128 if a.dtype.kind == "c" else np.float64
        np.testing.assert_allclose(
            a.astype(kind), b.astype(kind), rtol=rtol, atol=atol, err_msg=what
        )


def random_values(dtype, shape, seed=0):
    """Returns numpy values of a type: integers of its whole range, floats near 1."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.name in NARROW_INTEGERS:
        info = ml_dtypes.iinfo(dtype)
        return rng.integers(int(info.min), int(info.max) + 1, shape).astype(dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    if dtype.kind == "c":
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(
            dtype
        )
    if dtype.name == "float8_e8m0fnu":  # positive powers of two only
        return np.exp2(rng.integers(-3, 4, shape).astype(np.float32)).astype(dtype)
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


def pytest_generate_tests(metafunc):
    """Gives every test its backends; one marked ``host_only`` runs over one."""
    alone = metafunc.definition.get_closest_marker("host_only")
    backends = ["host"] if alone else ["host", "nccl"]
    metafunc.parametrize("default_backend", backends, indirect=True)


@pytest.fixture(autouse=True)
def default_backend(request, monkeypatch):
    """What serves the communicators nobody chose a backend for: "host" or "nccl"."""
    if request.param == "nccl":
        path = request.getfixturevalue("stand_in_path")
        monkeypatch.setenv("JAXCOMM_NCCL_LIBRARY", path)
        monkeypatch.setenv("JAXCOMM_BACKEND", "nccl")
        monkeypatch.setattr("jaxcomm.config.BACKEND", "nccl")
        library.load.cache_clear()
    yield request.param
    if request.param == "nccl":
        # Before the library is out of sight again.
        jaxcomm.finalize()
        library.load.cache_clear()


@pytest.fixture(scope="session")
def stacked():
    """Gives ``stacked(mesh, function, *operands)``; see run_stacked."""
    return run_stacked


@pytest.fixture(scope="session")
def by_group():
    """Gives ``by_group(mesh, axes, model, operands)``; see apply_by_group."""
    return apply_by_group


@pytest.fixture(scope="session")
def model():
    """The numpy models, by name."""
    return SimpleNamespace(
        all_reduce=all_reduce, all_gather=all_gather, reduce_scatter=reduce_scatter,
        all_to_all=all_to_all, permute=permute, broadcast=broadcast, scatter=scatter,
        scan=scan, only_on=only_on, fold=fold, identity=identity_of,
    )  # fmt: skip


@pytest.fixture(scope="session")
def identical():
    """Gives ``identical(found, expected)``; see assert_identical."""
    return assert_identical


@pytest.fixture(scope="session")
def near():
    """Gives ``near(found, expected, rtol)``; see assert_near."""
    return assert_near


@pytest.fixture(scope="session")
def values():
    """Gives ``values(dtype, shape, seed)``; see random_values."""
    return random_values


@pytest.fixture(scope="session")
def mesh_of():
    """Gives ``mesh_of(shape, names, devices)``: Auto axes, devices by index."""

    def make(shape, names, devices=None):
        order = range(math.prod(shape)) if devices is None else devices
        chosen = np.array([jax.devices()[i] for i in order]).reshape(shape)
        auto = (jax.sharding.AxisType.Auto,) * len(names)
        return jax.sharding.Mesh(chosen, names, axis_types=auto)

    return make


@pytest.fixture
def mesh(mesh_of):
    """Four devices along ``"i"``, where a file does not say otherwise."""
    return mesh_of((4,), ("i",))


@pytest.fixture
def x(values):
    """A (4, 8) array for each of four devices."""
    return values("float32", (4, 4, 8))


@pytest.fixture
def trace(mesh_of):
    """Gives ``trace(call)``: traces it in shard_map on 4 devices along "i".

    The call's operand is (6,) float32 unless another is given.
    """
    mesh = mesh_of((4,), ("i",))
    operands = np.zeros((4, 6), np.float32)

    def run(call, x=operands, check_vma=True):
        program = jax.shard_map(
            lambda x: call(jax.tree.map(lambda leaf: leaf[0], x))[None],
            mesh=mesh,
            in_specs=jax.P("i"),
            out_specs=jax.P("i"),
            check_vma=check_vma,
        )
        return jax.jit(program).trace(x)

    return run
