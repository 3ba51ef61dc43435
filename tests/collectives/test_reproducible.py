"""Sums whose bits do not depend on the number of ranks, nor on the backend.

The stand-in for NCCL adds in rank order, and XLA in its own: none of them by the tree.
"""

import json
import os
import sys

import forked
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

# A message, more than few bytes, and more than all ranks fetch at once; none of them a
# multiple of the ranks.
SIZES = (1, 7, 1001, 10_007, 150_001)
DTYPES = ("float32", "bfloat16", "float16", "complex64", "float64", "int16")
alike = pytest.mark.host_only(reason="names its backends")


def tree(rows):
    """Add numpy arrays: pairs of neighbours, then pairs of those."""
    rows = list(rows)
    while len(rows) > 1:
        pairs = [rows[i : i + 2] for i in range(0, len(rows), 2)]
        rows = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return rows[0]


def total(x):
    """Add by the tree in float32, and round once."""
    wide = x.astype(np.float32) if x.dtype.itemsize == 2 and x.dtype.kind != "i" else x
    return tree(wide).astype(x.dtype)


def averaged(x):
    """Add by the tree and divide in float32, and round once."""
    is_narrow = x.dtype.itemsize == 2 and x.dtype.kind != "i"
    wide = tree(x.astype(np.float32) if is_narrow else x)
    return (wide / wide.dtype.type(len(x))).astype(x.dtype)


def spread(values, dtype, shape, seed=0):
    """Numbers of different sizes, the first of them -0: the order of a sum shows."""
    if np.dtype(dtype).kind == "i":
        return values(dtype, shape, seed)
    scale = np.exp2(np.random.default_rng(seed).integers(-8, 9, shape))
    x = (values("float32", shape, seed) * scale).astype(jnp.dtype(dtype))
    if np.dtype(dtype).kind == "c":
        x = x + (1j * np.roll(x, 1)).astype(dtype)
    x[..., :1] = -0.0
    return x


def assert_bits(found, expected, what):
    """Compare with an array of numpy: JAX's indexing of sharded ones loses -0."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), what
    same = np.asarray(found).tobytes() == np.ascontiguousarray(expected).tobytes()
    assert same, (what, np.asarray(found)[:3], expected[:3], expected.size)


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        # Over three ranks the stand-in's order is the tree.
        *((ranks, None) for ranks in (1, 2, 8)),
        *(pytest.param(ranks, None, marks=alike) for ranks in (3, 6)),
        pytest.param(3, "xla", marks=alike),
    ],
)
def test_sums_are_trees_on_every_number_of_ranks(
    stacked, values, mesh_of, ranks, backend
):
    x = {
        f"{dtype}[{size}]": spread(values, dtype, (ranks, size), seed)
        for seed, dtype in enumerate(DTYPES)
        for size in SIZES
    }
    rows = {name: np.repeat(leaf[:, None, :7], ranks, 1) for name, leaf in x.items()}
    options = {"reproducible": True, "backend": backend}

    def program(x, rows):
        return (
            jaxcomm.psum(x, "i", **options),
            jaxcomm.psum_scatter(rows, "i", **options),
            jaxcomm.pmean({n: x[n] for n in x if "float" in n}, "i", **options),
        )

    with jax.enable_x64(True):
        sums, parts, means = stacked(mesh_of((ranks,), ("i",)), program, x, rows)
    for name, leaf in x.items():
        expected = total(leaf)
        assert_bits(np.asarray(sums[name])[-1], expected, name)
        assert_bits(np.asarray(parts[name])[-1], expected[:7], f"part of {name}")
        if name in means:
            mean = averaged(leaf)
            assert_bits(np.asarray(means[name])[0], mean, f"mean {name}")


@pytest.mark.parametrize("backend", [None, pytest.param("xla", marks=alike)])
def test_means_of_narrow_floats_are_rounded_once(stacked, mesh_of, backend):
    """To the float64 mean, where the sum is exact; the sum may be beyond the type."""
    rng = np.random.default_rng(0)
    for ranks in (2, 7, 8):
        x = {
            # Eight bits each, of sizes so near that float32 adds them exactly.
            dtype: (rng.integers(128, 256, (ranks, 501)) * top).astype(jnp.dtype(dtype))
            for dtype, top in (("float16", 250.0), ("bfloat16", 0.01))
        }

        def program(x, groups=(range(ranks),)):
            constant = np.full(3, 40_000, np.float16)
            options = {"reproducible": True, "backend": backend}
            return (
                jaxcomm.pmean(x, "i", **options),
                jaxcomm.pmean(x, "i", axis_index_groups=groups, **options),
                jax.grad(lambda x: jaxcomm.pmean(x, "i", **options).sum())(
                    x["float16"]
                ),
                jaxcomm.pmean(constant, "i", **options),
            )

        mesh = mesh_of((ranks,), ("i",))
        *means, slope, constant = stacked(mesh, program, x, check_vma=False)
        for found in means:
            for dtype, leaf in x.items():
                exact = leaf.astype(np.float64).mean(0).astype(leaf.dtype)
                assert_bits(np.asarray(found[dtype])[-1], exact, f"{dtype} of {ranks}")
        # Without check_vma every rank's loss counts: ranks times one over ranks.
        np.testing.assert_array_equal(slope, np.ones((ranks, 501), np.float16))
        np.testing.assert_array_equal(constant, np.float16(40_000))


def test_gradients_are_summed_by_the_tree(values, mesh_of, model):
    """Of parameters that are cast, gathered, or gathered as reduced; in a scope."""
    mesh, ranks = mesh_of((8,), ("i",)), 8
    x = spread(values, "float32", (ranks, ranks * 5))
    w = np.ones(ranks * 5, np.float32)

    def program(w, mine, x):
        def cast(w):
            return jnp.sum(jaxcomm.pcast(w, "i", to="varying") * x[0])

        def gather(mine, to):
            return jnp.sum(jaxcomm.all_gather(mine, "i", tiled=True, to=to) * x[0])

        def twice(w):
            return jax.grad(lambda w: jaxcomm.psum(jax.grad(cast)(w) * w, "i").sum())(w)

        return (
            jax.grad(cast)(w),
            jax.grad(gather)(mine, "varying"),
            jax.grad(gather)(mine, "reduced"),
            jax.jvp(lambda y: jaxcomm.psum(y, "i"), (x[0],), (x[0],))[1],
            jaxcomm.preduce(x[0], "i")[None],
            twice(w),
        )

    replicated, split = jax.P(), jax.P("i")
    specs = replicated, split, split
    out = replicated, split, split, replicated, split, replicated
    run = model.over(mesh, program, specs, out)
    with jaxcomm.using(reproducible=True):
        *found, reduced, _ = run(w, w, x)
    for i, each in enumerate([*found, np.asarray(reduced)[0]]):
        assert_bits(np.asarray(each), total(x), f"gradient {i}")


@pytest.mark.parametrize("axes", [("i", "v"), ("v", "i"), ("v",)])
def test_mapped_axes_are_ranks_too(stacked, values, mesh_of, axes):
    x = spread(values, "float32", (4, 3, 40))

    def program(x):
        def call(x):
            both = jaxcomm.psum(x, axes, reproducible=True)
            return both, jaxcomm.psum(x[:8], "v", reproducible=True)

        return jax.vmap(call, axis_name="v")(x)

    found, within = stacked(mesh_of((4,), ("i",)), program, x)
    order = {"v": x[0], "iv": x.reshape(12, 40), "vi": x.swapaxes(0, 1).reshape(12, 40)}
    assert_bits(np.asarray(found)[0, 0], total(order["".join(axes)]), axes)
    assert_bits(np.asarray(within)[1, 2], total(x[1])[:8], "v")


@pytest.mark.parametrize("backend", [None, pytest.param("xla", marks=alike)])
@pytest.mark.parametrize("size", [10_007, 20_011])
def test_ranks_of_several_axes_are_numbered_as_the_call_names_them(
    values, mesh_of, model, backend, size
):
    x = spread(values, "float32", (2, 4, size))
    specs = jax.P("a", "b"), jax.P()
    for axes, rows in (("ab", x), ("ba", x.swapaxes(0, 1))):

        def program(x, axes=tuple(axes)):
            options = {"reproducible": True, "backend": backend}
            return jaxcomm.psum(x[0, 0], axes, **options)

        run = model.over(mesh_of((2, 4), ("a", "b")), program, *specs)
        expected = total(rows.reshape(8, size))
        assert_bits(np.asarray(run(x)), expected, axes)


@pytest.mark.parametrize("backend", [None, pytest.param("xla", marks=alike)])
def test_groups_are_trees(stacked, values, mesh_of, backend):
    x = spread(values, "float32", (8, 20_011))
    equal, unequal = [[3, 1, 0, 6], [7, 5, 2, 4]], [[3, 1, 0, 6, 7], [5, 2, 4]]

    def program(x):
        options = {"reproducible": True, "backend": backend}
        return [
            jaxcomm.psum(x, "i", axis_index_groups=groups, **options)
            for groups in (equal, unequal)
        ]

    found = stacked(mesh_of((8,), ("i",)), program, x, check_vma=False)
    for each, groups in zip(found, (equal, unequal), strict=True):
        for group in groups:
            expected = total(x[np.array(group)])
            assert_bits(np.asarray(each)[group[0]], expected, group)


# Without XLA's usual optimization, which the tests leave out, nothing is fused.
OPTIMIZED = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
import jaxcomm

rng = np.random.default_rng(0)
a, b, c = (rng.standard_normal((16, 20_001)).astype(np.float32) for _ in range(3))
for backend, sizes in ("host", (1, 4, 16)), ("xla", (1, 2, 16)):
    for ranks in sizes:
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:ranks]), ("i",))
        def program(a, b, c):
            leaves = jaxcomm.local_sum(a * b)
            narrow = jaxcomm.local_sum((a * b).astype(jnp.bfloat16))
            options = {"reproducible": True, "backend": backend}
            of_ranks = jaxcomm.psum(a[0] * b[0], "i", **options)
            of_parts = jaxcomm.psum((a[0] * b[0])[:10_000], "i", **options)
            mapped = jax.vmap(
                lambda x: jaxcomm.psum(x, ("i", "v"), **options), axis_name="v")(a * c)
            return (
                of_parts + c[0, :10_000],
                jaxcomm.psum(leaves, "i", **options) + c[0],
                jaxcomm.psum(narrow, "i", **options).astype(jnp.bfloat16) * 3,
                of_ranks + c[0],
                mapped[0] + c[0],
                c[0] - np.float32(0.01) * jaxcomm.psum(leaves, "i", **options),
            )
        run = jax.shard_map(
            program, mesh=mesh, in_specs=(jax.P("i"),) * 3, out_specs=jax.P(),
            check_vma=False,
        )
        found = [np.asarray(y, np.float32)[:99] for y in jax.jit(run)(a, b, c)]
        print(json.dumps([ranks, *(y.tobytes().hex() for y in found)]))
"""


@alike
def test_programs_of_1_to_16_devices_round_alike_as_xla_optimizes_them():
    """On one device too, no term and no total is fused with what is around the sum."""
    env = os.environ | {"JAX_NUM_CPU_DEVICES": "16", "XLA_FLAGS": ""}
    run = forked.run(
        [sys.executable, "-c", OPTIMIZED], env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal((16, 20_001)).astype(np.float32) for _ in range(3))
    both, mapped = tree(a * b) + c[0], tree(a * c) + c[0]
    narrow = tree((a * b).astype(jnp.bfloat16).astype(np.float32))
    narrow = (narrow.astype(jnp.bfloat16) * jnp.bfloat16(3)).astype(np.float32)
    assert len(lines) == 6
    assert len({updated for *_, updated in lines}) == 1
    for ranks, *found, _ in lines:
        of_ranks = tree(a[:: 16 // ranks] * b[:: 16 // ranks]) + c[0]
        expected_of_all = (of_ranks, both, narrow, of_ranks, mapped)
        for got, expected in zip(found, expected_of_all, strict=True):
            got = np.frombuffer(bytes.fromhex(got), np.float32)
            assert_bits(got, expected[:99], f"{ranks} ranks")


@alike
def test_tree_sum_takes_any_dimension_dtype_and_number(values, model):
    x = spread(values, "float32", (3, 5, 4))
    for axis in (0, 1, -1):
        expected = tree(np.moveaxis(x, axis, 0))
        assert_bits(np.asarray(jaxcomm.local_sum(x, axis)), expected, axis)
    found = jaxcomm.local_sum({"b": np.ones(3, bool), "i": np.full(3, 100, np.int8)})
    assert (found["b"], found["i"].item()) == (3, 300 - 256)
    assert found["b"].dtype == jnp.int32
    half = jaxcomm.local_sum(x.astype(jnp.float16))
    assert_bits(np.asarray(half), tree(x.astype(np.float16).astype(np.float32)), "half")
    slope = jax.grad(lambda x: (jaxcomm.local_sum(x, 1) * -0.0).sum())(x)
    assert np.signbit(np.asarray(slope)).all()
    for call, error, message in (
        (lambda: jaxcomm.local_sum(x, 3), ValueError, "axis 3 is out of range"),
        (lambda: jaxcomm.local_sum(x[:0]), ValueError, "dimension 0 of x has size 0"),
        (
            lambda: jaxcomm.local_sum(x, 0.5),
            TypeError,
            "local_sum: axis must be an int",
        ),
        (lambda: jaxcomm.local_sum("x"), TypeError, "leaf of x must be an array"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_a_constant_is_multiplied_where_that_is_the_tree(stacked, mesh_of):
    sums = []

    def program(x):
        sums.append(jaxcomm.psum(0.1, "i", reproducible=True))
        return sums[-1] + 0 * x

    for size in (4, 7):
        mesh = mesh_of((size,), ("i",))
        found = stacked(mesh, program, np.zeros(size, np.float32))
        expected = tree([np.float32(0.1)] * size)
        assert_bits(np.asarray(found)[0], expected, "0.1")
    assert expected != np.float32(0.1) * np.float32(7)
    assert sums[0] == 0.4
    assert isinstance(sums[1], jax.core.Tracer)


def test_mapped_ranks_are_added_before_they_travel_where_that_is_the_tree(trace):
    def sums(x, count):
        def total(y):
            return jaxcomm.psum(y, ("i", "v"), reproducible=True)

        return jax.vmap(total, axis_name="v")(jnp.stack([x] * count))

    text = str(trace(lambda x: sums(x, 2)).jaxpr)
    assert "all_reduce" in text
    assert "all_gather" not in text
    assert "all_gather" in str(trace(lambda x: sums(x, 3)).jaxpr)
