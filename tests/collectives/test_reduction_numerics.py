"""What reductions do at the edges of each type: codes, NaN, infinities, rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

FLOAT8 = sorted(name for name in dir(jnp) if name.startswith("float8"))


def test_all_codes_of_narrow_floats_reduce_as_in_float32_rounded_once(
    stacked, identical, model, mesh_of, as_users_compile, default_backend
):
    """65,536 pairs of each type: every overflow, tie and subnormal there is."""
    mesh = mesh_of((2,), ("i",))
    pairs = {}
    for name in FLOAT8:
        code = np.arange(256, dtype=np.uint8).view(jnp.dtype(name))
        pairs[name] = np.stack([np.repeat(code, 256), np.tile(code, 256)])
    some = np.float32([np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0, -1.0, 3.4e38, -3.4e38])
    pairs["float32"] = np.stack([np.repeat(some, len(some)), np.tile(some, len(some))])
    for name in ("float16", "bfloat16"):
        code = np.arange(1 << 16, dtype=np.uint16).view(jnp.dtype(name))
        if name == "bfloat16":
            # Its subnormals are those of float32, which XLA's threads flush.
            code = code[
                ~(np.abs(code.astype(np.float32)) < float(jnp.finfo(name).tiny))
            ]
        pairs[name] = np.stack([code, np.zeros_like(code)])
    if default_backend == "nccl":
        # XLA reduces this, and on CPU takes 2**-127 for 0: a NaN.
        pairs.pop("float8_e8m0fnu", None)

    def program(x):
        return jaxcomm.psum(x, "i"), jaxcomm.pmax(x, "i"), jaxcomm.pprod(x, "i")

    # Over NCCL it is XLA that rounds, which is right with its fusions alone.
    found = stacked(mesh, program, pairs, options=as_users_compile)
    for result, op in zip(found, ("sum", "max", "prod"), strict=True):
        for name, pair in pairs.items():
            got, expected = np.asarray(result[name])[0], model.fold(pair, op)
            if op == "max":  # which zero wins is not said
                got, expected = got.astype(np.float32), expected.astype(np.float32)
                if default_backend == "nccl":  # NCCL decides about NaN
                    got = np.where(np.isnan(expected), np.nan, got)
                np.testing.assert_array_equal(got, expected, err_msg=name)
            else:
                identical(got, expected, f"{op} of {name}")


def test_many_small_summands_do_not_stall_in_the_narrow_type(stacked, mesh_of):
    """1 + 7 halves of an ulp: rounding after each addition would stay at 1.

    Also with 8 halves more under vmap, and in one of two groups 5.
    """
    mesh = mesh_of((8,), ("i",))
    x = {}
    for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
        eps = float(jnp.finfo(name).eps)
        x[name] = np.array([1.0] + [eps / 2] * 7, np.float32).astype(jnp.dtype(name))

    def program(x):
        return (
            jaxcomm.psum(x, "i"),
            jaxcomm.preduce(x, "i"),
            jaxcomm.pscan(x, "i", reverse=True),
            jaxcomm.psum_scatter(jax.tree.map(lambda v: jnp.full(8, v), x), "i"),
        )

    def over_both(x):
        halves = jnp.stack([x, jnp.full_like(x, float(jnp.finfo(x.dtype).eps) / 2)])
        return jax.vmap(lambda x: jaxcomm.psum(x, ("i", "v")), axis_name="v")(halves)[0]

    def in_groups(x):
        groups = [[1, 2], [0, 3, 4, 5, 6, 7]]
        return jaxcomm.psum(x, "i", axis_index_groups=groups)

    def others(x):
        in_xla = jaxcomm.psum(x, "i", backend="xla")
        return in_xla, jax.tree.map(over_both, x), in_groups(x)

    found = *stacked(mesh, program, x), *stacked(mesh, others, x)
    for totals, halves in zip(found, (7, 7, 7, 7, 7, 15, 5), strict=True):
        for name, total in totals.items():
            eps = float(jnp.finfo(name).eps)
            exact = np.float32(1 + halves / 2 * eps).astype(jnp.dtype(name))
            assert np.asarray(total)[0] == exact, (name, halves)


def _assert_nan_wins(stacked, mesh, *names):
    rows = np.repeat(np.float32([[1], [1], [2], [3]]), 5, 1)
    np.fill_diagonal(rows, np.nan)
    rows[:, 4] = np.inf, 2, -np.inf, np.nan
    with np.errstate(all="ignore"):
        x = {name: rows.astype(jnp.dtype(name)) for name in names}

    def program(x):
        return jaxcomm.pmax(x, "i"), jaxcomm.pmin(x, "i"), jaxcomm.psum(x, "i")

    for result in stacked(mesh, program, x):
        for name, found in result.items():
            with np.errstate(all="ignore"):
                assert np.isnan(np.asarray(found).astype(np.complex64)).all(), name


@pytest.mark.host_only(reason="NCCL's own maxima decide about NaN")
def test_nan_wins_whoever_has_it(stacked, mesh):
    """As in jnp.maximum; jax.lax.pmax on CPU loses the NaN of some ranks."""
    names = "float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"
    _assert_nan_wins(stacked, mesh, *names)


def test_complex_numbers_compare_lexicographically_and_nan_wins(stacked, mesh):
    rows = np.array([[1 + 2j, 3 - 1j], [1 + 5j, 3 - 2j], [0 + 9j, 2 + 9j], [1, 3]])
    x = rows.astype(np.complex64)
    found = stacked(mesh, lambda x: (jaxcomm.pmax(x, "i"), jaxcomm.pmin(x, "i")), x)
    np.testing.assert_array_equal(found[0][0], [1 + 5j, 3])
    np.testing.assert_array_equal(found[1][0], [9j, 2 + 9j])
    _assert_nan_wins(stacked, mesh, "complex64")
