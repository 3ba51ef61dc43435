"""What collectives should give, according to numpy, and programs over stacked operands.

A stacked array holds the operands, or results, of all devices along axis 0 in the
order of the mesh. A model is a function from the stacked operands of one group, in rank
order, to its stacked results. It computes with numpy, or with jax.numpy on what is
traced.
"""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

UFUNCS = {"sum": "add", "prod": "multiply", "max": "maximum", "min": "minimum"}
NARROW_FLOATS = ("bfloat16", "float16", "float8_", "float6_", "float4_")
NARROW_INTEGERS = ("int4", "uint4", "int2", "uint2")


def over(mesh, call, specs=None, out=None, check_vma=True, jit=True, options=None):
    """Map ``call`` over a mesh: specs that are not given split the first dimension.

    Compiled with XLA's options, unless ``jit`` is False.
    """
    split = jax.P(tuple(mesh.axis_names))
    program = jax.shard_map(
        call,
        mesh=mesh,
        in_specs=split if specs is None else specs,
        out_specs=split if out is None else out,
        check_vma=check_vma,
    )
    return jax.jit(program, compiler_options=options) if jit else program


def run_stacked(mesh, function, *stacked, **options):
    def local(*operands):
        results = function(*jax.tree.map(lambda x: x[0], operands))
        return jax.tree.map(lambda x: jnp.asarray(x)[None], results)

    return over(mesh, local, **options)(*stacked)


def apply_by_group(mesh, axes, model, stacked, index_groups=None):
    """Apply a numpy model to each group of devices over ``axes``."""
    stacked = np.asarray(stacked)
    grid = mesh.devices.shape
    places = [mesh.axis_names.index(axis) for axis in axes]
    order = places + [place for place in range(len(grid)) if place not in places]
    size = math.prod(grid[place] for place in places)
    flat = np.arange(math.prod(grid)).reshape(grid).transpose(order).reshape(size, -1)
    results = {}
    for column in flat.T:
        for indices in index_groups or [range(size)]:
            group = column[list(indices)]
            results |= dict(zip(group.tolist(), model(stacked[group]), strict=True))
    return np.stack([results[device] for device in range(len(results))])


def wide(x):
    """Return the operands in the type in which the collectives accumulate."""
    if x.dtype.name.startswith(NARROW_FLOATS):
        return x.astype(np.float32)
    if x.dtype.name in NARROW_INTEGERS:
        return x.astype(np.int32)
    return x


def library_of(x):
    return np if isinstance(x, (np.ndarray, np.generic)) else jnp


def fold(group, op):
    """Reduce by a binary tree over the ranks, in the wide type, and round once."""
    xp = library_of(group)
    if group.dtype == np.bool_ and op in ("sum", "prod"):
        group = group.astype(np.int32)
    combine = getattr(xp, UFUNCS[op])
    with np.errstate(all="ignore"):
        level = list(wide(group))
        while len(level) > 1:
            pairs = zip(level[::2], level[1::2], strict=False)
            last = level[-1:] if len(level) % 2 else []
            level = [*(combine(a, b) for a, b in pairs), *last]
        return xp.asarray(level[0]).astype(group.dtype)


def identity_of(op, dtype):
    dtype = np.dtype(dtype)
    if op in ("sum", "prod"):
        return np.asarray(op == "prod").astype(dtype)
    if dtype == np.bool_:
        return np.asarray(op == "min")
    if dtype.kind in "iu":
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    elif dtype.itemsize == 1:  # not all of these have infinities
        codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
        least, most = np.nanmin(codes), np.nanmax(codes)
    elif dtype.kind == "c":
        most = complex(np.inf, np.inf)
        least = -most
    else:
        least, most = -np.inf, np.inf
    return np.asarray(least if op == "max" else most).astype(dtype)


def whole(group):
    return group


def _on_all(result, count):
    return library_of(result).stack([result] * count)


def all_reduce(op):
    return lambda group: _on_all(fold(group, op), len(group))


def mean(group):
    total = fold(group, "sum")
    if total.dtype.kind in "iu":
        total = total.astype(np.float32)
    return _on_all(total / total.dtype.type(len(group)), len(group))


def all_gather(axis=0, tiled=False):
    def model(group):
        xp = library_of(group)
        put = xp.concatenate if tiled else xp.stack
        return _on_all(put(list(group), axis), len(group))

    return model


def cut(x, size, axis, tiled):
    xp = library_of(x)
    parts = xp.stack(xp.split(x, size, axis))
    return parts if tiled else xp.squeeze(parts, axis + 1)


def reduce_scatter(axis=0, tiled=False):
    return lambda group: cut(fold(group, "sum"), len(group), axis, tiled)


def all_to_all(split, concat, tiled=False):
    def model(group):
        xp, size = library_of(group), len(group)
        pieces = [cut(x, size, split, tiled) for x in group]  # [source][target]
        put = xp.concatenate if tiled else xp.stack
        return xp.stack(
            [put([pieces[s][t] for s in range(size)], concat) for t in range(size)]
        )

    return model


def permute(perm):
    def model(group):
        xp = library_of(group)
        pairs = perm(len(group)) if callable(perm) else perm
        source_of = {target: source for source, target in pairs}
        return xp.stack(
            [
                group[source_of[rank]] if rank in source_of else xp.zeros_like(x)
                for rank, x in enumerate(group)
            ]
        )

    return model


def broadcast(root=0):
    return lambda group: _on_all(group[root], len(group))


def only_on(root, model):
    def masked(group):
        xp, every = library_of(group), model(group)
        return xp.stack(
            [x if rank == root else xp.zeros_like(x) for rank, x in enumerate(every)]
        )

    return masked


def scatter(root=0, axis=0, tiled=False):
    return lambda group: cut(group[root], len(group), axis, tiled)


def scan(op="sum", exclusive=False, reverse=False):
    def model(group):
        xp, size = library_of(group), len(group)
        if group.dtype == np.bool_ and op in ("sum", "prod"):
            group = group.astype(np.int32)
        start = xp.full(group.shape[1:], identity_of(op, group.dtype), group.dtype)
        outs = []
        for rank in range(size):
            before = list(range(size - 1, rank, -1) if reverse else range(rank))
            seen = before if exclusive else [*before, rank]
            outs.append(fold(group[np.array(seen)], op) if seen else start)
        return xp.stack(outs)

    return model


def _pairs(found, expected, what):
    """Yield the leaves of equal trees, whose dtypes and shapes are equal."""
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(found) == len(expected), what
    for a, b in zip(map(np.asarray, found), map(np.asarray, expected), strict=True):
        where = f"{what} {b.dtype}{list(b.shape)}"
        assert (a.dtype, a.shape) == (b.dtype, b.shape), (where, a.dtype, a.shape)
        yield a, b, where


def assert_identical(found, expected, what=""):
    """Assert equal trees: dtypes, shapes and bits; any NaN equals any other."""
    for a, b, where in _pairs(found, expected, what):
        if a.dtype.name in NARROW_INTEGERS or a.dtype.kind in "biu":
            np.testing.assert_array_equal(wide(a), wide(b), err_msg=where)
            continue
        if a.dtype.kind == "c":
            assert_identical((a.real, a.imag), (b.real, b.imag), what)
            continue
        bits = np.dtype(f"u{a.dtype.itemsize}")
        a_bits, b_bits = (np.ascontiguousarray(x).view(bits) for x in (a, b))
        wrong = a_bits != b_bits
        if wrong.any():
            with np.errstate(all="ignore"):
                wrong &= ~np.isnan(a.astype(float)) | ~np.isnan(b.astype(float))
        assert not wrong.any(), (where, a[wrong][:8], b[wrong][:8])


def assert_near(found, expected, rtol, what="", atol=0.0):
    """Assert close trees of floats; the caller says why so close and no closer."""
    for a, b, where in _pairs(found, expected, what):
        kind = np.complex128 if a.dtype.kind == "c" else np.float64
        np.testing.assert_allclose(
            a.astype(kind), b.astype(kind), rtol, atol, err_msg=where
        )


def random_values(dtype, shape, seed=0):
    """Return numpy values of a type: integers of its whole range, floats near 1."""
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
    if dtype.name == "float8_e8m0fnu":  # positive powers of two only
        return np.exp2(rng.integers(-3, 4, shape).astype(np.float32)).astype(dtype)
    real = rng.standard_normal(shape)
    if dtype.kind == "c":
        return (real + 1j * rng.standard_normal(shape)).astype(dtype)
    return real.astype(np.float32).astype(dtype)
