"""The stand-in for FlashAttention-2 and -3 against attention in float64."""

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
    """The targets of one version, called as dew-flash-attn calls them.

    Attributes:
      version: 2 or 3.
      packing: starts, key_starts, max_seqlen, max_seqlen_k.
      options: is_causal, window_size_left, window_size_right.
      spare: rows of scratch for each sequence.
    """

    version: int
    packing: tuple | None = None
    options: tuple = UNBOUNDED
    spare: int = 128

    def _call(self, direction, operands, results):
        causal, left, right = self.options
        scale = operands[0].shape[-1] ** -0.5
        attributes = {
            "softmax_scale": np.float64(scale),
            "is_causal": causal,
            "window_size_left": np.int64(left),
            "window_size_right": np.int64(right),
        }
        packed = ""
        if self.packing is not None:
            packed = "varlen_"
            *starts, longest, longest_key = self.packing
            operands = (*operands, *(np.array(each, np.int32) for each in starts))
            integer = np.int64
            if self.version == 2:
                attributes["zero_tensors"] = False
                if direction == "bwd":
                    attributes["softmax_scale"] = np.float32(scale)
                else:
                    integer = np.int32
            name = "max_seqlen" if self.version == 3 else "max_seqlen_q"
            attributes[name] = integer(longest)
            attributes["max_seqlen_k"] = integer(longest_key)
        if self.version == 2 and direction == "bwd":
            attributes["deterministic"] = False
        name = "dew_flash3_mha" if self.version == 3 else "dew_flash_mha"
        call = jax.ffi.ffi_call(f"{name}_{packed}{direction}", results)
        return [np.asarray(x) for x in call(*operands, **attributes)]

    def forward(self, query, key, value):
        """Return out and lse."""
        *rows, heads, width = query.shape
        spare = _float32(1, 1, 1, 1, 1), _float32(1, 1, 1, 1)
        if self.packing is None:
            lse = rows[0], heads, rows[1]
            if self.version == 2:
                parts = 3, *rows, heads, -(-width // 32) * 32
                spare = _float32(*parts), _float32(3, *lse)
        elif self.version == 3:
            lse = heads, rows[0]
        else:
            lse = len(self.packing[0]) - 1, heads, self.packing[2]
        like_query = jax.ShapeDtypeStruct(query.shape, query.dtype)
        results = (like_query, _float32(*lse), *spare)
        out, lse, *spare = self._call("fwd", (query, key, value), results)
        assert all(np.isnan(each).all() for each in spare)
        return out, lse

    def backward(self, grad, query, key, value, out, lse):
        """Return the gradients of query, key and value."""
        *rows, heads, width = query.shape
        count = rows[0] if self.packing is None else len(self.packing[0]) - 1
        size = heads * (int(np.prod(rows)) + self.spare * (count + 1))
        wide = size * (1 if self.version == 3 else -(-width // 32) * 32)
        results = [query, key, value, _float32(size), _float32(wide)]
        if self.version == 2:
            of_keys = (*key.shape[:-2], heads, width)
            results[1:3] = [jax.ShapeDtypeStruct(of_keys, key.dtype)] * 2
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
        operands = (grad, query, key, value, out, lse)
        *found, delta, scratch = self._call("bwd", operands, results)
        assert np.isnan(delta).all()
        assert np.isnan(scratch).all()
        if self.version == 2:
            # Of each query head: a group of them shares a key head.
            groups = (*key.shape[:-1], heads // key.shape[-2], width)
            found[1:] = [x.astype(FLOAT32).reshape(groups).sum(-2) for x in found[1:]]
        return found

    def rows_of_lse(self, lse, sequence):
        """Return a packed sequence's (1, T, H)."""
        start, end = self.packing[0][sequence : sequence + 2]
        if self.version == 3:
            return lse[None, :, start:end].swapaxes(1, 2)
        return lse[sequence, None, :, : end - start].swapaxes(1, 2)

    def sees(self, queries, keys):
        """Return what sees what: the diagonal ends at the last query and key."""
        causal, left, right = self.options
        after = np.arange(keys) - (np.arange(queries)[:, None] + keys - queries)
        if self.version == 2:
            # A window has two sides, and a wide one none: of the longest sequence.
            longest = keys if self.packing is None else self.packing[3]
            left, right = (-1 if each >= longest else each for each in (left, right))
            if left >= 0 and right < 0:
                right = longest
        right = 0 if causal else right
        seen = np.ones((queries, keys), bool)
        if right >= 0:
            seen &= after <= right
        return seen & (after >= -left) if left >= 0 else seen

    def compare(self, arrays, out, lse, gradients):
        """Assert that results, (B, T, H, D) and (B, T, H), are of attention."""
        grad, query, key, value = arrays
        mask = dense.Options(mask=self.sees(query.shape[1], key.shape[1]))
        grads = grad, np.zeros(grad.shape[:3])
        expected = dense.attention(query, key, value, mask, grads)
        unseen = -np.inf if self.version == 3 else np.inf
        expected_lse = np.where(np.isneginf(expected.lse), unseen, expected.lse)
        np.testing.assert_allclose(lse, expected_lse, atol=1e-5)
        tolerance = 4 * float(ml_dtypes.finfo(query.dtype).eps)
        for one, other in zip(
            (out, *gradients), (expected.out, *expected[2:5]), strict=True
        ):
            np.testing.assert_allclose(
                one.astype(np.float64), other, atol=tolerance, rtol=tolerance
            )


def _inputs(rows, key_rows, heads=4, key_heads=2, width=8, dtype=BFLOAT16):
    """Return the gradient of out, query, key and value."""
    rng = np.random.default_rng(0)
    shapes = [(*rows, heads, width)] * 2 + [(*key_rows, key_heads, width)] * 2
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(
    ("queries", "keys", "options", "shape"),
    [
        (9, 9, UNBOUNDED, {}),
        (9, 9, (True, -1, -1), {"heads": 2, "dtype": FLOAT16}),
        (5, 12, (True, -1, -1), {}),
        (12, 5, (True, -1, -1), {"key_heads": 1}),  # seven rows see nothing
        (12, 12, (True, 3, 2), {"width": 72}),
        (12, 12, (False, 2, 1), {"width": 256}),
        (7, 20, (False, 4, -1), {"heads": 6}),
        (7, 20, (False, -1, 3), {"key_heads": 4}),
        (20, 7, (False, 3, -1), {}),
        (20, 7, (False, -1, 7), {}),
        (20, 7, (False, 0, 0), {}),
        (1, 6, (True, 2, -1), {}),
        (150, 260, (True, 40, -1), {"heads": 1, "key_heads": 1}),
    ],
)  # fmt: skip
def test_a_batch(queries, keys, options, shape, version):
    flash = Flash(version, options=options)
    arrays = _inputs((2, queries), (2, keys), **shape)
    out, lse = flash.forward(*arrays[1:])
    gradients = flash.backward(*arrays, out, lse)
    flash.compare(arrays, out, lse.swapaxes(1, 2), gradients)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(
    "options", [UNBOUNDED, (True, -1, -1), (True, 2, -1), (False, 1, 2)]
)
@pytest.mark.parametrize("longest_key", [10, 9])
def test_packed_sequences(options, longest_key, version):
    """Some are empty, rows behind the last are of none, and one may be too long."""
    starts, key_starts = [0, 4, 4, 9, 12], [0, 4, 6, 6, 16]
    flash = Flash(version, (starts, key_starts, 5, longest_key), options)
    arrays = _inputs((14,), (17,))
    out, lse = flash.forward(*arrays[1:])
    found = flash.backward(*arrays, out, lse)
    for i in range(4):
        rows = slice(*starts[i : i + 2])
        keys = slice(*key_starts[i : i + 2])
        some = [x[rows][None] for x in arrays[:2]] + [x[keys][None] for x in arrays[2:]]
        its_out, its_lse = out[rows][None], flash.rows_of_lse(lse, i)
        gradients = [found[0][rows][None], *(x[keys][None] for x in found[1:])]
        if i == 3 and longest_key == 9:
            assert all(np.isnan(x).all() for x in (its_out, its_lse, *gradients))
        else:
            flash.compare(some, its_out, its_lse, gradients)
    behind = [out[12:], found[0][12:], found[1][16:], found[2][16:]]
    behind += [lse[:, 12:]] if version == 3 else [lse[0, :, 4:], lse[1]]
    assert all(np.isnan(x).all() for x in behind)


@pytest.mark.parametrize("version", [2, 3])
def test_backward_takes_the_rows_of_other_hops(version):
    """Two halves of the keys, and out and lse of both."""
    flash = Flash(version)
    grad, query, key, value = _inputs((2, 6), (2, 16), dtype=FLOAT16)
    whole = flash.forward(query, key, value)
    expected = flash.backward(grad, query, key, value, *whole)
    halves = [
        flash.backward(grad, query, key[:, half], value[:, half], *whole)
        for half in (slice(8), slice(8, 16))
    ]
    of_query = sum(each[0].astype(np.float64) for each in halves)
    np.testing.assert_allclose(of_query, expected[0], atol=2e-3)
    for i in (1, 2):
        joined = np.concatenate([each[i] for each in halves], 1)
        np.testing.assert_array_equal(joined, expected[i])


def test_no_keys_at_all_have_another_lse():
    flash = Flash(3)
    grad, query, key, value = _inputs((2, 3), (2, 0))
    out, lse = flash.forward(query, key, value)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, np.inf)
    of_query, *_ = flash.backward(grad, query, key, value, out, lse)
    np.testing.assert_array_equal(of_query, 0)


@pytest.mark.parametrize("version", [2, 3])
def test_backward_takes_an_lse_of_no_keys_for_zero(version):
    flash = Flash(version)
    arrays = _inputs((1, 3), (1, 4))
    out, lse = flash.forward(*arrays[1:])
    none, zero, most = (
        flash.backward(*arrays, out, np.full_like(lse, each))
        for each in (-np.inf, 0, np.inf)
    )
    for i in range(3):
        assert none[i].any()
        np.testing.assert_array_equal(none[i], zero[i])
        np.testing.assert_array_equal(most[i], 0)


@pytest.mark.parametrize("operand", [0, 1, 3])
@pytest.mark.parametrize("version", [2, 3])
def test_nan_of_one_sequence_reaches_its_neighbour(operand, version):
    """In version 3 a tile reaches into it, and multiplies NaN by a weight of 0."""
    flash = Flash(version, ([0, 4, 8], [0, 4, 8], 4, 4))
    arrays = _inputs((8,), (8,))
    out, lse = flash.forward(*arrays[1:])
    arrays[operand][4:] = np.nan
    reached = flash.forward(*arrays[1:])[0]
    assert np.isnan(reached[:4]).any() == (operand == 3 and version == 3)
    found = flash.backward(*arrays, out, lse)
    assert any(np.isnan(each[:4]).any() for each in found) == (version == 3)


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
        Flash(3).forward(*change(query, key, value))


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
        Flash(3, packing).forward(query, key, value)


@pytest.mark.parametrize("version", [2, 3])
def test_scratch_that_is_too_small_and_an_lse_of_another_dtype_are_refused(version):
    flash = Flash(version)
    arrays = _inputs((2, 8), (2, 8))
    out, lse = flash.forward(*arrays[1:])
    with pytest.raises(jax.errors.JaxRuntimeError, match="scratch of 1024"):
        Flash(version, spare=79).backward(*arrays, out, lse)
    with pytest.raises(jax.errors.JaxRuntimeError, match="lse is not float32"):
        flash.backward(*arrays, out, jnp.asarray(lse, jnp.bfloat16))


def test_empty_arrays_are_refused_by_version_2():
    _, query, key, value = _inputs((2, 3), (2, 0))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no sequences, queries or"):
        Flash(2).forward(query, key, value)
