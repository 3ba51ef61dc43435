"""Small sums by this package's own kernels on two NVIDIA GPUs or more."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

pytestmark = pytest.mark.gpu

# By lines, then staged: from 98308 words on two GPUs, 32772 on four, 14044 on eight.
SIZES = [
    *(1, 2, 3, 31, 32, 33, 257, 1000, 4096),
    *(14044, 32772, 65537, 98308, 262148, 1048576),
]


def outs(mesh, function, x):
    spec = jax.P("i")
    # Not device_put: between processes it finds that NaN is not NaN.
    whole, sharding = np.asarray(x), jax.NamedSharding(mesh, spec)
    x = jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    found = jax.jit(mapped)(x).addressable_shards
    # What the ranks of this process get.
    return np.concatenate([np.asarray(shard.data) for shard in found])


def counted():
    return sum(one.stats()["one_shot_calls"] for one in jaxcomm.communicators())


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int32", "uint32", "complex64"]
)
def test_sums_of_all_sizes_are_those_of_float64(ring, gpus, dtype):
    jaxcomm.init(ring, "i")
    random = np.random.default_rng(0)
    for size in SIZES if gpus else SIZES[:6:2]:
        values = random.normal(0, 10, (ring.size, size))
        if dtype == "complex64":
            values = values + 1j * values[::-1]
        x = jnp.asarray(values).astype(dtype)
        found = outs(ring, lambda x: jaxcomm.psum(x, "i"), x)
        wide = "complex128" if dtype == "complex64" else "float64"
        exact = np.asarray(x).astype(wide).sum(0)
        assert found.dtype == x.dtype
        # Every addition rounds, by half a unit in the last place; narrow ones are wide
        # until the last.
        last = {"bfloat16": 2**-8, "float16": 2**-11}.get(dtype, 0)
        rounding = 0 if "int" in dtype else last + (ring.size - 1) * 2**-24
        error = np.abs(found.astype(wide) - exact)
        assert (error <= 1.01 * rounding * np.abs(values).sum(0) + 1e-9).all(), size
    assert counted() > 0


def test_special_values(ring):
    jaxcomm.init(ring, "i")
    rows = np.zeros((ring.size, 6), np.float32)
    rows[0] = [np.inf, np.nan, np.inf, -0.0, 1e-45, 3e38]
    rows[1] = [1, 1, -np.inf, -0.0, 1e-45, 3e38]
    for dtype in ("float32", "bfloat16"):
        x = jnp.asarray(rows).astype(dtype)
        found = outs(ring, lambda x: jaxcomm.psum(x, "i"), x)[0]
        wide = np.asarray(x).astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            expected = wide.sum(0).astype(np.float32)
        np.testing.assert_array_equal(found.astype(np.float32)[:4], expected[:4])
        assert found.astype(np.float32)[4] == (2.8e-45 if dtype == "float32" else 0)
        assert np.isinf(found.astype(np.float32)[5])


def test_what_only_moves_and_slices_of_sums_are_those_of_jax_lax(ring, gpus):
    jaxcomm.init(ring, "i")
    around = [(i, (i + 1) % ring.size) for i in range(ring.size)]

    def every(module):
        def local(x):
            found = (
                module.all_gather(x, "i", tiled=True),
                module.all_to_all(x, "i", 0, 0, tiled=True),
                module.psum_scatter(x, "i", tiled=True),
                module.ppermute(x, "i", around),
            )
            return jnp.concatenate(found)

        return lambda x: outs(ring, local, x)

    # The last gather is of 4 MiB: more goes to NCCL.
    most = (1 << 20) // ring.size**2 // 4 * 4
    for words in (8, 4096, most // 2, most) if gpus else (8, most):
        x = np.arange(words * ring.size**2, dtype=np.int32)
        before = counted()
        np.testing.assert_array_equal(every(jaxcomm)(x), every(jax.lax)(x))
        assert counted() == before + 4


@pytest.mark.parametrize("tokens", [96, 2048])
def test_exchanges_of_heads_in_a_row_are_those_of_jax_lax(ring, gpus, tokens):
    """In one chunk and in several, with sums between: ranks may be one call apart."""
    jaxcomm.init(ring, "i")
    tokens = tokens if gpus else tokens // 16

    def turns(module):
        def there_and_back(xs, _):
            heads = module.all_to_all(xs, "i", 2, 1, tiled=True)
            sums = jax.tree.map(lambda x: module.psum(x[:, :1], "i"), heads)
            heads = jax.tree.map(lambda x, y: x + y, heads, sums)
            return list(module.all_to_all(heads, "i", 1, 2, tiled=True)), None

        def local(x):
            # Sums of these round nowhere.
            xs = [x[:, :, : h * ring.size].astype("float32") for h in (4, 1, 1)]
            return jnp.concatenate(jax.lax.scan(there_and_back, xs, None, 5)[0], 2)

        return local

    lax = lambda x, *arguments, **named: jax.tree.map(  # noqa: E731
        lambda x: jax.lax.all_to_all(x, *arguments, **named), x
    )
    theirs = types.SimpleNamespace(all_to_all=lax, psum=jax.lax.psum)
    shape = ring.size, tokens, 4 * ring.size, 64
    x = np.random.default_rng(0).integers(-4, 5, shape).astype(np.int8)
    before = counted()
    np.testing.assert_array_equal(
        outs(ring, turns(jaxcomm), x), outs(ring, turns(theirs), x)
    )
    # Two GPUs copy long rows.
    assert counted() - before >= 5 * 3


def test_thousands_in_a_row(ring, gpus):
    """Each needs the one before; a line taken for another's would show."""
    jaxcomm.init(ring, "i")
    count = 20_000 if gpus else 20

    def local(x):
        def turn(x, _):
            return jaxcomm.psum(x, "i") / ring.size + 1.0, x[0, 0]

        return jax.lax.scan(turn, x, None, length=count)[0]

    x = np.zeros((ring.size, 300), np.float32)
    np.testing.assert_array_equal(outs(ring, local, x), float(count))
    assert counted() >= count


def test_a_policy_leaves_them_to_nccl(ring):
    jaxcomm.init(ring, "i", policy=jaxcomm.CommPolicy(one_shot=False))
    x = np.ones((ring.size, 4), np.float32)
    found = outs(ring, lambda x: jaxcomm.psum(x, "i"), x)
    np.testing.assert_array_equal(found, ring.size)
    assert counted() == 0
