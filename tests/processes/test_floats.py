"""Sums of floats between processes of several devices: every type, all its range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

pytestmark = pytest.mark.multiprocess

FLOATS = sorted(
    name for name in dir(jnp) if name.startswith(("float8", "float16", "bfloat16"))
)
# XLA's threads, and so ours, take their subnormal numbers for 0.
FLUSHED = {
    "bfloat16": np.float32, "float32": np.float32, "complex64": np.float32,
    "float64": np.float64,
}  # fmt: skip


def all_codes(name, ranks):
    """Return a row for each rank: every number of a type, or some of all its range."""
    rng = np.random.default_rng(0)
    if name == "complex64":
        x = all_codes("float32", 2 * ranks)
        return x[:ranks] + np.complex64(1j) * x[ranks:]
    dtype = np.dtype(jnp.dtype(name))
    bits = np.dtype(f"u{dtype.itemsize}")
    if dtype.itemsize > 2:
        shape = ranks, 4096
        return rng.integers(0, np.iinfo(bits).max, shape, bits, endpoint=True).view(
            dtype
        )
    codes = np.arange(256**dtype.itemsize).astype(bits)
    return np.stack([rng.permutation(codes) for _ in range(ranks)]).view(dtype)


def tree(x, name):
    """Add by the tree of docs/reproducibility.md; round once."""
    wide = FLUSHED.get(name, np.float32)
    tiny = np.finfo(wide).tiny

    def flush(x):
        return np.where(np.abs(x) < tiny, x * 0, x) if name in FLUSHED else x

    level = [flush(row) for row in (x if x.itemsize > 2 else x.astype(wide))]
    while len(level) > 1:
        level = [flush(a + b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0].astype(x.dtype)


def sums_of_all_codes(here, mesh):
    names = (*FLOATS, "float32", "float64")
    x = {name: all_codes(name, mesh.size) for name in names}
    with jax.enable_x64(True):
        found = here.run(
            mesh,
            lambda x: {
                reproducible: (
                    jaxcomm.psum(x, "i", reproducible=reproducible),
                    jaxcomm.psum_scatter(x, "i", tiled=True, reproducible=reproducible),
                )
                for reproducible in (False, True)
            },
            x,
        )
    for reproducible, (sums, parts) in found.items():
        for name, codes in x.items():
            with np.errstate(all="ignore"):
                total = tree(codes, name)
            what = f"{name}, reproducible={reproducible}"
            here.identical(mesh, sums[name], np.stack([total] * mesh.size), what)
            split = total.reshape(mesh.size, -1)
            here.identical(mesh, parts[name], split, f"part of {what}")


def test_sums_of_every_float_type_are_trees_in_float32_rounded_once(team):
    team.call(sums_of_all_codes, at=(2, 2))


def chains(here, mesh):
    tiny = np.float32(1e-39)

    def program(ones):
        sums, quotients = [], []
        for reproducible in (False, True) * 4:
            total = jaxcomm.psum(ones, "i", reproducible=reproducible)
            # What XLA computes after it may run on a thread of ours.
            product = tiny * total
            quotients.append(product / product)
            sums.append(jaxcomm.psum(tiny * ones, "i", reproducible=reproducible))
            ones = ones + jnp.where(sums[-1] > 1, 1, 0)
        return jnp.stack(sums), jnp.stack(quotients)

    for size in (3, 5000):  # a message, and a stream of chunks
        run = here.program(mesh, program)
        ones = here.put(mesh, np.ones((mesh.size, size), np.float32))
        for _ in range(20):
            sums, quotients = here.mine(run(ones))
            assert (sums == 0).all(), np.unique(sums)
            assert np.isnan(quotients).all(), np.unique(quotients)


def test_subnormal_numbers_count_as_zero_on_every_rank_and_every_time(team):
    team.call(chains, at=(2, 2))
