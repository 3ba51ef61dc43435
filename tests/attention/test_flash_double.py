"""The stand-in for FlashAttention-3 against attention in float64."""

import dense
import flash_double
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)


@pytest.fixture(autouse=True)
def registered():
    flash_double.register()


def _like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _call(direction, operands, results, packing, options):
    """Call a target; ``packing`` is (starts, key_starts, max_seqlen, max_seqlen_k)."""
    causal, left, right = options
    attributes = {
        "softmax_scale": np.float64(operands[0].shape[-1] ** -0.5),
        "is_causal": causal,
        "window_size_left": np.int64(left),
        "window_size_right": np.int64(right),
    }
    name = f"dew_flash3_mha_{direction}"
    if packing is not None:
        *starts, longest, longest_key = packing
        operands = (*operands, *(np.array(each, np.int32) for each in starts))
        attributes["max_seqlen"] = np.int64(longest)
        attributes["max_seqlen_k"] = np.int64(longest_key)
        name = f"dew_flash3_mha_varlen_{direction}"
    return [
        np.asarray(x) for x in jax.ffi.ffi_call(name, results)(*operands, **attributes)
    ]


def _forward(query, key, value, packing=None, options=(False, -1, -1)):
    *rows, heads, _ = query.shape
    lse = (rows[0], heads, rows[1]) if packing is None else (heads, rows[0])
    results = (
        _like(query),
        jax.ShapeDtypeStruct(lse, FLOAT32),
        jax.ShapeDtypeStruct((1, 1, 1, 1), FLOAT32),
        jax.ShapeDtypeStruct((1, 1, 1), FLOAT32),
    )
    out, lse, *unused = _call("fwd", (query, key, value), results, packing, options)
    assert all(np.isnan(each).all() for each in unused)
    return out, lse


def _backward(
    grad, query, key, value, out, lse, packing=None, options=(False, -1, -1), spare=128
):
    *rows, heads, _ = query.shape
    count = rows[0] if packing is None else len(packing[0]) - 1
    size = heads * (int(np.prod(rows)) + spare * (count + 1))
    scratch = jax.ShapeDtypeStruct((size,), FLOAT32)
    operands = (grad, query, key, value, out, lse)
    results = (*map(_like, (query, key, value)), scratch, scratch)
    *found, delta, lse_log2 = _call("bwd", operands, results, packing, options)
    assert np.isnan(delta).all()
    assert np.isnan(lse_log2).all()
    return found


def _inputs(rows, key_rows, heads=4, key_heads=2, width=8, dtype=BFLOAT16):
    rng = np.random.default_rng(0)
    shapes = [(*rows, heads, width)] * 2 + [(*key_rows, key_heads, width)] * 2
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def _mask(queries, keys, options):
    """Return what sees what: the diagonal ends at the last query and the last key."""
    causal, left, right = options
    after = np.arange(keys) - (np.arange(queries)[:, None] + keys - queries)
    seen = np.ones((queries, keys), bool)
    if causal or right >= 0:
        seen &= after <= (0 if causal else right)
    return seen & (after >= -left) if left >= 0 else seen


def _compare(arrays, found, options):
    grad, query, key, value = arrays
    mask = dense.Options(mask=_mask(query.shape[1], key.shape[1], options))
    grads = grad, np.zeros(grad.shape[:3])
    expected = dense.attention(query, key, value, mask, grads)
    tolerance = 4 * float(ml_dtypes.finfo(query.dtype).eps)
    out, lse, *gradients = found
    np.testing.assert_allclose(lse.swapaxes(1, 2), expected.lse, atol=1e-5)
    for one, other in zip(
        (out, *gradients), (expected.out, *expected[2:5]), strict=True
    ):
        np.testing.assert_allclose(
            one.astype(np.float64), other, atol=tolerance, rtol=tolerance
        )


@pytest.mark.parametrize(
    ("queries", "keys", "options", "shape"),
    [
        (9, 9, (False, -1, -1), {}),
        (9, 9, (True, -1, -1), {"heads": 2, "dtype": np.dtype(np.float16)}),
        (5, 12, (True, -1, -1), {}),
        (12, 5, (True, -1, -1), {"key_heads": 1}),  # seven rows see nothing
        (12, 12, (True, 3, 2), {"width": 72}),
        (12, 12, (False, 2, 1), {"width": 256}),
        (7, 20, (False, 4, -1), {"heads": 6}),
        (7, 20, (False, -1, 3), {"key_heads": 4}),
        (20, 7, (False, 0, 0), {}),
        (1, 6, (True, 2, -1), {}),
        (150, 260, (True, 40, -1), {"heads": 1, "key_heads": 1}),
    ],
)  # fmt: skip
def test_a_batch(queries, keys, options, shape):
    arrays = _inputs((2, queries), (2, keys), **shape)
    out, lse = _forward(*arrays[1:], options=options)
    found = _backward(*arrays, out, lse, options=options)
    _compare(arrays, (out, lse, *found), options)


@pytest.mark.parametrize(
    "options", [(False, -1, -1), (True, -1, -1), (True, 2, -1), (False, 1, 2)]
)
@pytest.mark.parametrize("longest", [0, 9])
def test_packed_sequences(options, longest):
    """Some are empty, rows behind the last are of none, and one may be too long."""
    starts, key_starts = [0, 4, 4, 9, 12], [0, 4, 6, 6, 16]
    packing = starts, key_starts, 5, longest or 10
    arrays = _inputs((14,), (17,))
    out, lse = _forward(*arrays[1:], packing, options)
    found = _backward(*arrays, out, lse, packing, options)
    left_out = 3 if longest else None
    for i in range(4):
        mine = slice(*starts[i : i + 2])
        keys = slice(*key_starts[i : i + 2])
        some = [
            x[rows][None]
            for x, rows in zip(arrays, (mine, mine, keys, keys), strict=True)
        ]
        results = [
            x[rows][None]
            for x, rows in zip((out, *found), (mine, mine, keys, keys), strict=True)
        ]
        if i == left_out:
            assert all(np.isnan(x).all() for x in (*results, lse[:, mine]))
        else:
            results.insert(1, lse[None, :, mine])
            _compare(some, results, options)
    behind = out[12:], lse[:, 12:], found[0][12:], found[1][16:], found[2][16:]
    assert all(np.isnan(x).all() for x in behind)


def test_backward_takes_the_rows_of_other_hops():
    """Two halves of the keys, and out and lse of both."""
    grad, query, key, value = _inputs((2, 6), (2, 16), dtype=np.dtype(np.float16))
    whole = _forward(query, key, value)
    expected = _backward(grad, query, key, value, *whole)
    halves = [
        _backward(grad, query, key[:, half], value[:, half], *whole)
        for half in (slice(8), slice(8, 16))
    ]
    of_query = sum(each[0].astype(np.float64) for each in halves)
    np.testing.assert_allclose(of_query, expected[0], atol=2e-3)
    for i in (1, 2):
        joined = np.concatenate([each[i] for each in halves], 1)
        np.testing.assert_array_equal(joined, expected[i])


def test_no_keys_at_all_are_another_lse():
    grad, query, key, value = _inputs((2, 3), (2, 0))
    out, lse = _forward(query, key, value)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, np.inf)
    of_query, *_ = _backward(grad, query, key, value, out, lse)
    np.testing.assert_array_equal(of_query, 0)


def test_backward_takes_an_lse_of_no_keys_for_zero():
    grad, query, key, value = _inputs((1, 3), (1, 4))
    out, lse = _forward(query, key, value)
    none, zero, most = (
        _backward(grad, query, key, value, out, np.full_like(lse, each))
        for each in (-np.inf, 0, np.inf)
    )
    for i in range(3):
        assert none[i].any()
        np.testing.assert_array_equal(none[i], zero[i])
        np.testing.assert_array_equal(most[i], 0)


@pytest.mark.parametrize("operand", [0, 1, 3])
def test_nan_of_one_sequence_reaches_its_neighbour(operand):
    """A tile reaches into it, where a weight of 0 is multiplied by NaN."""
    arrays = _inputs((8,), (8,))
    packing = [0, 4, 8], [0, 4, 8], 4, 4
    out, lse = _forward(*arrays[1:], packing)
    arrays[operand][4:] = np.nan
    reached = _forward(*arrays[1:], packing)[0] if operand == 3 else out
    assert np.isnan(reached[:4]).any() == (operand == 3)
    found = _backward(*arrays, out, lse, packing)
    assert any(np.isnan(each[:4]).any() for each in found)


def _cut(x, rows):
    return x[:, :rows]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda q, k, v: (q[..., :7], k[..., :7], v[..., :7]), "multiple of 8"),
        (lambda q, k, v: (q, k, v[..., :7]), "not one shape"),
        (lambda q, k, v: [np.tile(x, 33) for x in (q, k, v)], "at most 256"),
        (lambda q, k, v: (q[:, :, :3], k, v), "does not divide"),
        (lambda q, k, v: (q, k[:1], v[:1]), "batch sizes differ"),
        (lambda q, k, v: (q, k.astype(np.float16), v), "one rank and dtype"),
        (lambda q, k, v: [x.astype(FLOAT32) for x in (q, k, v)], "neither float16"),
    ],
)  # fmt: skip
def test_what_the_kernels_do_not_take_is_refused(change, says):
    _, query, key, value = _inputs((2, 8), (2, 8))
    with pytest.raises(jax.errors.JaxRuntimeError, match=says):
        _forward(*change(query, key, value))


@pytest.mark.parametrize(
    ("packing", "says"),
    [
        (([0, 8], [0, 4, 8], 8, 8), "two int32 vectors"),
        (([0, 9], [0, 8], 9, 8), "rows that there are not"),
        (([0, 5, 4, 8], [0, 2, 4, 8], 8, 8), "descend"),
        (([0, 8], [0, 8], 8, 0), "max_seqlen is not positive"),
    ],
)
def test_packing_that_names_no_rows_is_refused(packing, says):
    _, query, key, value = _inputs((8,), (8,))
    with pytest.raises(jax.errors.JaxRuntimeError, match=says):
        _forward(query, key, value, packing)


def test_scratch_that_is_too_small_and_an_lse_of_another_dtype_are_refused():
    arrays = _inputs((2, 8), (2, 8))
    out, lse = _forward(*arrays[1:])
    with pytest.raises(jax.errors.JaxRuntimeError, match="scratch buffers of 1024"):
        _backward(*arrays, out, lse, spare=79)
    with pytest.raises(jax.errors.JaxRuntimeError, match="lse is not float32"):
        _backward(*arrays, out, jnp.asarray(lse, jnp.bfloat16))
