"""What reductions do at the edges of each type: codes, NaN, infinities, rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

FLOAT8 = sorted(name for name in dir(jnp) if name.startswith("float8"))


@pytest.fixture
def mesh(mesh_of):
    return mesh_of((4,), ("i",))


def _all_codes(name):
    return np.arange(256, dtype=np.uint8).view(jnp.dtype(name))


def _reduced(backend):
    # Over NCCL XLA reduces float8_e8m0fnu, and on CPU takes 2**-127 for 0: a NaN.
    return [name for name in FLOAT8 if backend == "host" or name != "float8_e8m0fnu"]


def test_all_codes_of_float8_survive_a_sum_with_zero_and_a_maximum_with_themselves(
    stacked, by_group, identical, model, mesh, default_backend
):
    """Zero is what the type makes of 0: float8_e8m0fnu has none, its least is added."""
    codes = {name: _all_codes(name) for name in _reduced(default_backend)}
    zero = {n: np.zeros(256, np.float32).astype(c.dtype) for n, c in codes.items()}
    added = {n: np.stack([zero[n], c, zero[n], zero[n]]) for n, c in codes.items()}
    same = {n: np.stack([c] * 4) for n, c in codes.items()}

    def program(added, same):
        return {
            "psum": jaxcomm.psum(added, "i"),
            "psum_scatter": jaxcomm.psum_scatter(added, "i", tiled=True),
            "pmax": jaxcomm.pmax(same, "i"),
            "pmin": jaxcomm.pmin(same, "i"),
            "gathered": jaxcomm.all_gather(same, "i", tiled=True),
        }

    found = jax.tree.map(np.asarray, stacked(mesh, program, added, same))
    for name, code in codes.items():
        for op, x in (("psum", added), ("pmax", same), ("pmin", same)):
            kind = {"psum": "sum", "pmax": "max", "pmin": "min"}[op]
            expected = by_group(mesh, ("i",), model.all_reduce(kind), x[name])
            identical(found[op][name], expected, f"{op} of {name}")
        expected = by_group(mesh, ("i",), model.reduce_scatter(0, True), added[name])
        identical(found["psum_scatter"][name], expected, f"psum_scatter of {name}")
        if name != "float8_e8m0fnu":
            with np.errstate(all="ignore"):
                kept = found["psum"][name][0].astype(np.float32)
                np.testing.assert_array_equal(kept, code.astype(np.float32))
        # Moved, even a NaN keeps its bits.
        moved = found["gathered"][name].view(np.uint8)
        np.testing.assert_array_equal(moved[0], np.tile(code.view(np.uint8), 4))


def test_all_pairs_of_float8_codes_sum_as_in_float32_rounded_once(
    stacked, identical, model, mesh_of, as_users_compile, default_backend
):
    """65,536 pairs of each type: every overflow, tie and subnormal there is."""
    mesh = mesh_of((2,), ("i",))
    pairs = {}
    for name in _reduced(default_backend):
        code = _all_codes(name)
        pairs[name] = np.stack([np.repeat(code, 256), np.tile(code, 256)])

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


def test_all_codes_of_16_bit_floats_survive_a_sum_with_zero(
    stacked, mesh, model, identical
):
    x = {}
    for name in ("float16", "bfloat16"):
        code = np.arange(1 << 16, dtype=np.uint16).view(jnp.dtype(name))
        zero = np.zeros_like(code)
        x[name] = np.stack([zero, zero, code, zero])
    found = stacked(mesh, lambda x: jaxcomm.psum(x, "i"), x)
    for name, stack in x.items():
        # A bfloat16 subnormal is a float32 subnormal, which XLA's threads flush.
        tiny = float(jnp.finfo(name).tiny) if name == "bfloat16" else 0.0
        with np.errstate(all="ignore"):
            keep = ~(np.abs(stack[2].astype(np.float32)) < tiny)
        identical(
            np.asarray(found[name])[0][keep], model.fold(stack, "sum")[keep], name
        )


def test_many_small_summands_do_not_stall_in_the_narrow_type(stacked, mesh_of):
    """1 + 7 halves of an ulp: rounding after each addition would stay at 1."""
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

    in_xla = stacked(mesh, lambda x: jaxcomm.psum(x, "i", backend="xla"), x)
    for found in (*stacked(mesh, program, x), in_xla):
        for name, total in found.items():
            eps = float(jnp.finfo(name).eps)
            exact = np.float32(1 + 3.5 * eps).astype(jnp.dtype(name))
            assert np.asarray(total)[0] == exact, name


def _with_nan(*names):
    rows = np.array(
        [
            [np.nan, 1, 1, 1, np.inf, 0.5],
            [1, np.nan, 1, 1, 2, -np.inf],
            [2, 2, np.nan, 2, -np.inf, 2],
            [3, 3, 3, np.nan, np.nan, np.inf],
        ],
        np.float32,
    )
    with np.errstate(all="ignore"):
        return {name: rows.astype(jnp.dtype(name)) for name in names}


def _assert_nan_wins(stacked, mesh, x):
    def program(x):
        return jaxcomm.pmax(x, "i"), jaxcomm.pmin(x, "i"), jaxcomm.psum(x, "i")

    found = jax.tree.map(np.asarray, stacked(mesh, program, x))
    for name in x:
        with np.errstate(all="ignore"):
            for result in found:
                assert np.isnan(result[name][:, :5].astype(np.complex64)).all(), name


@pytest.mark.host_only(reason="NCCL's own maxima decide about NaN")
def test_nan_wins_whoever_has_it(stacked, mesh):
    """As in jnp.maximum; jax.lax.pmax on CPU loses the NaN of some ranks."""
    names = "float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"
    _assert_nan_wins(stacked, mesh, _with_nan(*names))


def test_nan_wins_among_complex_numbers(stacked, mesh):
    _assert_nan_wins(stacked, mesh, _with_nan("complex64"))


def test_infinities_and_signed_zeros_add_by_the_rules_of_ieee(
    stacked, identical, model, mesh
):
    rows = np.array(
        [
            [np.inf, np.inf, -0.0, -0.0, 0.0, 3.4e38],
            [1.0, -np.inf, -0.0, 0.0, -0.0, 3.4e38],
            [1.0, 0.0, -0.0, -0.0, -0.0, -3.4e38],
            [-1.0, 0.0, -0.0, -0.0, -0.0, -3.4e38],
        ],
        np.float32,
    )
    found = np.asarray(stacked(mesh, lambda x: jaxcomm.psum(x, "i"), rows))
    identical(found[3], model.fold(rows, "sum"))
    twin = np.asarray(stacked(mesh, lambda x: jax.lax.psum(x, "i"), rows))
    np.testing.assert_array_equal(found, twin)  # but for the sign of zeros


def test_integer_sums_and_products_wrap_around(stacked, identical, mesh):
    x = {}
    for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32"):
        info = jnp.iinfo(name)
        x[name] = np.full(
            (4, 3), [info.max, info.min, info.max // 2 + 1], jnp.dtype(name)
        )

    def program(x):
        return jaxcomm.psum(x, "i"), jaxcomm.pprod(x, "i")

    sums, products = stacked(mesh, program, x)
    for name, stack in x.items():
        exact = [sum(int(v) for v in column) for column in stack.T]
        powers = [int(column[0]) ** 4 for column in stack.T]
        for found, wanted in ((sums, exact), (products, powers)):
            bits = jnp.iinfo(name).bits
            row = [int(v) % (1 << bits) for v in np.asarray(found[name])[0]]
            assert row == [v % (1 << bits) for v in wanted], name


def test_float32_sums_are_within_the_bound_of_sequential_summation(
    stacked, mesh_of, values
):
    mesh = mesh_of((8,), ("i",))
    x = values("float32", (8, 10_007))

    def program(x):
        return jaxcomm.psum(x, "i"), jaxcomm.pscan(x, "i")[None]

    total, prefix = stacked(mesh, program, x)
    exact = x.astype(np.float64).sum(0)
    # Seven additions, each wrong by at most half an ulp of a partial sum.
    bound = 7 * 2.0**-24 * np.abs(x.astype(np.float64)).sum(0)
    assert (np.abs(np.asarray(total, np.float64)[0] - exact) <= bound).all()
    assert (np.abs(np.asarray(prefix, np.float64)[7, 0] - exact) <= bound).all()


def test_every_device_gets_the_same_bits(stacked, mesh_of, values):
    mesh = mesh_of((8,), ("i",))
    x = values("float32", (8, 300_001)) * np.exp2(
        values("float32", (8, 300_001), 1) * 20
    )
    found = np.asarray(stacked(mesh, lambda x: jaxcomm.psum(x, "i"), x))
    assert (found.view(np.uint32) == found[0].view(np.uint32)).all()
    again = np.asarray(stacked(mesh, lambda x: jaxcomm.psum(x, "i"), x))
    assert (found.view(np.uint32) == again.view(np.uint32)).all()


def test_complex_numbers_compare_lexicographically(stacked, identical, mesh):
    rows = np.array([[1 + 2j, 3 - 1j], [1 + 5j, 3 - 2j], [0 + 9j, 2 + 9j], [1, 3]])
    x = rows.astype(np.complex64)
    found = stacked(mesh, lambda x: (jaxcomm.pmax(x, "i"), jaxcomm.pmin(x, "i")), x)
    np.testing.assert_array_equal(np.asarray(found[0])[0], [1 + 5j, 3])
    np.testing.assert_array_equal(np.asarray(found[1])[0], [9j, 2 + 9j])
