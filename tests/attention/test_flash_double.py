"""The stand-in for FlashAttention-3 against attention in float64."""

import dataclasses

import dense
import flash_double
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)
UNBOUNDED = (False, -1, -1)


@pytest.fixture(autouse=True)
def registered():
    flash_double.register()


def _float32(*shape):
    return jax.ShapeDtypeStruct(shape, FLOAT32)


@dataclasses.dataclass(frozen=True)
class Flash:
    """The targets, called as dew-flash-attn calls them.

    Attributes:
      packing: starts, key_starts, max_seqlen, max_seqlen_k.
      options: is_causal, window_size_left, window_size_right.
      spare: rows of scratch for each sequence.
    """

    packing: tuple | None = None
    options: tuple = UNBOUNDED
    spare: int = 128

    def _call(self, direction, operands, results):
        causal, left, right = self.options
        attributes = {
            "softmax_scale": np.float64(operands[0].shape[-1] ** -0.5),
            "is_causal": causal,
            "window_size_left": np.int64(left),
            "window_size_right": np.int64(right),
        }
        if self.packing is not None:
            direction = f"varlen_{direction}"
            *starts, longest, longest_key = self.packing
            operands = (*operands, *(np.array(each, np.int32) for each in starts))
            attributes["max_seqlen"] = np.int64(longest)
            attributes["max_seqlen_k"] = np.int64(longest_key)
        call = jax.ffi.ffi_call(f"dew_flash3_mha_{direction}", results)
        return [np.asarray(x) for x in call(*operands, **attributes)]

    def forward(self, query, key, value):
        *rows, heads, _ = query.shape
        lse = (rows[0], heads, rows[1]) if self.packing is None else (heads, rows[0])
        like_query = jax.ShapeDtypeStruct(query.shape, query.dtype)
        results = (like_query, _float32(*lse), _float32(1), _float32(1))
        out, lse, *spare = self._call("fwd", (query, key, value), results)
        assert all(np.isnan(each).all() for each in spare)
        return out, lse

    def backward(self, grad, query, key, value, out, lse):
        *rows, heads, _ = query.shape
        count = rows[0] if self.packing is None else len(self.packing[0]) - 1
        size = heads * (int(np.prod(rows)) + self.spare * (count + 1))
        results = [query, key, value, _float32(size), _float32(size)]
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
        operands = (grad, query, key, value, out, lse)
        *found, delta, scratch = self._call("bwd", operands, results)
        assert np.isnan(delta).all()
        assert np.isnan(scratch).all()
        return found

    def compare(self, arrays, out, lse, gradients):
        """Assert that results, (B, T, H, D) and (B, T, H), are of attention."""
        grad, query, key, value = arrays
        queries, keys, (causal, left, right) = (
            query.shape[1],
            key.shape[1],
            self.options,
        )
        # The diagonal ends at the last query and key.
        after = np.arange(keys) - (np.arange(queries)[:, None] + keys - queries)
        right = 0 if causal else right
        seen = ((left < 0) | (after >= -left)) & ((right < 0) | (after <= right))
        mask = dense.Options(mask=seen)
        grads = grad, np.zeros(grad.shape[:3])
        expected = dense.attention(query, key, value, mask, grads)
        np.testing.assert_allclose(lse, expected.lse, atol=1e-5)
        tolerance = 4 * float(ml_dtypes.finfo(query.dtype).eps)
        for one, other in zip(
            (out, *gradients), (expected.out, *expected[2:5]), strict=True
        ):
            np.testing.assert_allclose(
                one.astype(np.float64), other, atol=tolerance, rtol=tolerance
            )


def _inputs(rows, key_rows, heads=4, key_heads=2, width=8, dtype=BFLOAT16):
    rng = np.random.default_rng(0)
    shapes = [(*rows, heads, width)] * 2 + [(*key_rows, key_heads, width)] * 2
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("queries", "keys", "options", "shape"),
    [
        (9, 9, (True, -1, -1), {"heads": 2, "dtype": FLOAT16}),
        (5, 12, (True, -1, -1), {}),
        (12, 5, (True, -1, -1), {"key_heads": 1}),  # seven rows see nothing
        (12, 12, (False, 2, 1), {"width": 256}),
        (7, 20, (False, 4, -1), {"heads": 6}),
        (20, 7, (False, -1, 7), {}),
        (150, 260, (True, 40, -1), {"heads": 1, "key_heads": 1}),
    ],
)
def test_a_batch(queries, keys, options, shape):
    flash = Flash(options=options)
    arrays = _inputs((2, queries), (2, keys), **shape)
    out, lse = flash.forward(*arrays[1:])
    gradients = flash.backward(*arrays, out, lse)
    flash.compare(arrays, out, lse.swapaxes(1, 2), gradients)


@pytest.mark.parametrize("options", [UNBOUNDED, (True, 2, -1), (False, 1, 2)])
@pytest.mark.parametrize("longest_key", [10, 9])
def test_packed_sequences(options, longest_key):
    """Some are empty, rows behind the last are of none, and one may be too long."""
    starts, key_starts = [0, 4, 4, 9, 12], [0, 4, 6, 6, 16]
    flash = Flash((starts, key_starts, 5, longest_key), options)
    arrays = _inputs((14,), (17,))
    out, lse = flash.forward(*arrays[1:])
    found = flash.backward(*arrays, out, lse)
    for i in range(4):
        rows = slice(*starts[i : i + 2])
        keys = slice(*key_starts[i : i + 2])
        some = [x[rows][None] for x in arrays[:2]] + [x[keys][None] for x in arrays[2:]]
        its_out, its_lse = out[rows][None], lse[None, :, rows].swapaxes(1, 2)
        gradients = [found[0][rows][None], *(x[keys][None] for x in found[1:])]
        if i == 3 and longest_key == 9:
            assert all(np.isnan(x).all() for x in (its_out, its_lse, *gradients))
        else:
            flash.compare(some, its_out, its_lse, gradients)
    behind = [out[12:], found[0][12:], found[1][16:], found[2][16:], lse[:, 12:]]
    assert all(np.isnan(x).all() for x in behind)


def test_backward_takes_an_lse_of_no_keys_for_zero_and_no_keys_at_all_have_another():
    arrays = _inputs((1, 3), (1, 4))
    out, lse = Flash().forward(*arrays[1:])
    none, zero = (
        Flash().backward(*arrays, out, np.full_like(lse, each)) for each in (-np.inf, 0)
    )
    for one, other in zip(none, zero, strict=True):
        assert one.any()
        np.testing.assert_array_equal(one, other)
    _, query, key, value = _inputs((2, 3), (2, 0))
    out, lse = Flash().forward(query, key, value)
    assert (out == 0).all()
    assert (lse == np.inf).all()


@pytest.mark.parametrize("operand", [0, 1, 3])
def test_nan_of_one_sequence_reaches_its_neighbour(operand):
    """A tile reaches into it, and multiplies NaN by a weight of 0."""
    flash = Flash(([0, 4, 8], [0, 4, 8], 4, 4))
    arrays = _inputs((8,), (8,))
    out, lse = flash.forward(*arrays[1:])
    arrays[operand][4:] = np.nan
    reached = flash.forward(*arrays[1:])[0]
    assert np.isnan(reached[:4]).any() == (operand == 3)
    found = flash.backward(*arrays, out, lse)
    assert any(np.isnan(each[:4]).any() for each in found)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda q, k, v: (q[..., :7], k[..., :7], v[..., :7]), "multiple of 8"),
        (lambda q, k, v: [np.tile(x, 33) for x in (q, k, v)], "at most 256"),
        (lambda q, k, v: (q[:, :, :3], k, v), "does not divide"),
        (lambda q, k, v: (q, k.astype(np.float16), v), "one rank and dtype"),
        (lambda q, k, v: [x.astype(FLOAT32) for x in (q, k, v)], "neither float16"),
    ],
)  # fmt: skip
def test_what_the_kernels_do_not_take_is_refused(change, says):
    _, query, key, value = _inputs((2, 8), (2, 8))
    with pytest.raises(jax.errors.JaxRuntimeError, match=says):
        Flash().forward(*change(query, key, value))


@pytest.mark.parametrize(
    ("packing", "says"),
    [
        (([0, 8], [0, 4, 8], 8, 8), "two int32 vectors"),
        (([0, 9], [0, 8], 9, 8), "rows that there are not"),
        (([0, 5, 4, 8], [0, 2, 4, 8], 8, 8), "descend"),
    ],
)
def test_packing_that_names_no_rows_is_refused(packing, says):
    _, query, key, value = _inputs((8,), (8,))
    with pytest.raises(jax.errors.JaxRuntimeError, match=says):
        Flash(packing).forward(query, key, value)


def test_scratch_that_is_too_small_and_an_lse_of_another_dtype_are_refused():
    arrays = _inputs((2, 8), (2, 8))
    out, lse = Flash().forward(*arrays[1:])
    with pytest.raises(jax.errors.JaxRuntimeError, match="scratch of 1024"):
        Flash(spare=79).backward(*arrays, out, lse)
    with pytest.raises(jax.errors.JaxRuntimeError, match="lse is not float32"):
        Flash().backward(*arrays, out, jnp.asarray(lse, jnp.bfloat16))
