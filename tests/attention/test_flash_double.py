"""The stand-in for FlashAttention-3 is as unkind as the kernels.

Its numbers are compared with float64 in ``strategies/test_flash.py``.
"""

import dataclasses

import flash_double
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

FLOAT32 = np.dtype(np.float32)


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
      is_causal: whether the diagonal, which ends at the last query and key, bounds.
      spare: rows of scratch for each sequence.
    """

    packing: tuple | None = None
    is_causal: bool = False
    spare: int = 128

    def _call(self, direction, operands, results):
        attributes = {
            "softmax_scale": np.float64(operands[0].shape[-1] ** -0.5),
            "is_causal": self.is_causal,
            "window_size_left": np.int64(-1),
            "window_size_right": np.int64(-1),
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


def _inputs(rows, key_rows):
    rng = np.random.default_rng(0)
    shapes = [(*rows, 4, 8)] * 2 + [(*key_rows, 2, 8)] * 2
    return [rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in shapes]


def test_what_it_does_not_compute_is_nan():
    """Rows behind the last sequence, and a sequence that is too long."""
    starts, key_starts = [0, 4, 4, 9, 12], [0, 4, 6, 6, 16]
    flash = Flash((starts, key_starts, 5, 9), is_causal=True)
    arrays = _inputs((14,), (17,))
    out, lse = flash.forward(*arrays[1:])
    query, key, value = flash.backward(*arrays, out, lse)
    for x in (out, query, lse.T):
        assert np.isfinite(x[:4]).all()
        assert np.isnan(x[9:]).all()
    for x in (key, value):
        assert np.isfinite(x[:6]).all()
        assert np.isnan(x[6:]).all()


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


def test_packing_of_rows_that_there_are_not_and_small_scratch_are_refused():
    arrays = _inputs((8,), (8,))
    for starts, says in (([0, 9], "rows that there are not"), ([0, 9, 8], "descend")):
        flash = Flash((starts, [0, 8, 8][: len(starts)], 9, 8))
        with pytest.raises(jax.errors.JaxRuntimeError, match=says):
            flash.forward(*arrays[1:])
    arrays = _inputs((2, 8), (2, 8))
    out, lse = Flash().forward(*arrays[1:])
    with pytest.raises(jax.errors.JaxRuntimeError, match="scratch of 1024"):
        Flash(spare=79).backward(*arrays, out, lse)
    with pytest.raises(jax.errors.JaxRuntimeError, match="lse is not float32"):
        Flash().backward(*arrays, out, jnp.asarray(lse, jnp.bfloat16))
