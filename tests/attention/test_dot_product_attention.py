"""The twin of jax.nn.dot_product_attention for plain jit, in natural order."""

import contextlib

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split

import jaxcomm


def test_natural_order_in_and_out_with_gradients(make_mesh):
    mesh, tokens = make_mesh(data=2, context=4), 29
    *arrays, grads = split.inputs((2, tokens, 4, 8), (2, tokens, 2, 8))
    rng = np.random.default_rng(0)
    bias = jnp.asarray(rng.standard_normal((1, 4, tokens, tokens)), jnp.float32)
    ids = np.sort(rng.integers(0, 3, (2, tokens)), 1)

    def attend(query, key, value, bias):
        return jaxcomm.dot_product_attention(
            query, key, value, bias, mesh=mesh, axis_name="context", is_causal=True,
            query_segment_ids=ids, return_residual=True,
        )  # fmt: skip

    (out, lse), transpose = jax.vjp(jax.jit(attend), *arrays, bias)
    options = dense.Options(is_causal=True, bias=bias, query_ids=ids)
    expected = dense.attention(*arrays, options, grads)
    split.assert_close((out, lse, *transpose(grads)), expected)


@pytest.mark.parametrize("is_set", [True, False])
def test_axes_that_split_batch_and_heads_stay(is_set):
    """Under jax.set_mesh; else the mesh is named, and other axes split nothing."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "context", "model"))
    arrays = split.inputs((2, 6, 2, 4), (2, 6, 2, 4))[:3]

    def loss(attend):
        return lambda q, k, v: (attend(q, k, v) ** 2).sum()

    def ours(q, k, v):
        out = jaxcomm.dot_product_attention(
            q, k, v, axis_name="context", mesh=None if is_set else mesh,
            strategy="all_gather",
        )  # fmt: skip
        if is_set:
            spec = jax.P("data", "context", "model", None)
            assert jax.typeof(out).sharding.spec == spec
        return out

    expected = jax.grad(loss(jax.nn.dot_product_attention), (0, 1, 2))(*arrays)
    gradient = jax.jit(jax.grad(loss(ours), (0, 1, 2)))
    spec = jax.P("data", None, "model") if is_set else jax.P("data", "context")
    placed = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x in arrays]
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        found = gradient(*placed)
    for one, other in zip(found, expected, strict=True):
        assert one.sharding.spec[:2] == spec[:2]
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_outside_of_jit_it_is_one_program_compiled_once():
    compiled = []

    def listen(event, seconds, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(seconds)

    x = jax.random.normal(jax.random.key(0), (1, 12, 2, 8))

    def attend(**options):
        return jaxcomm.dot_product_attention(
            x,
            x,
            x,
            mesh=split.ring_over(2),
            axis_name="context",
            is_causal=True,
            **options,
        )

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        found = [attend(), attend()]
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert 1 <= len(compiled) <= 3
    jax.block_until_ready(found)
    # It names a communicator that is closed then, and is compiled again.
    jaxcomm.finalize()
    expected = jax.nn.dot_product_attention(x, x, x, is_causal=True)
    for out in (*found, attend()):
        np.testing.assert_array_equal(out, found[0])
        np.testing.assert_allclose(out, expected, atol=1e-5)
    # An array is no key of a cache: refused, or compiled in parts.
    with pytest.raises(TypeError, match="local_window_size"):
        attend(local_window_size=np.array([3, 0]))


def gathered(x, **options):
    return jaxcomm.dot_product_attention(
        x, x, x, mesh=split.ring_over(2), axis_name="context", strategy="all_gather",
        **options,
    )  # fmt: skip


def test_a_mask_and_a_bias_of_fewer_dimensions_broadcast_as_in_jax_nn():
    """Also where programs forbid it, see ``jax.numpy_rank_promotion``."""
    x = jax.random.normal(jax.random.key(0), (2, 5, 2, 4))
    # Each token sees itself: where a row sees no key, jax.nn gives a mean.
    sees = jax.random.bernoulli(jax.random.key(1), 0.5, (5, 5)) | jnp.eye(5, dtype=bool)
    options = {"mask": sees, "bias": jnp.arange(5.0)}
    expected = jax.nn.dot_product_attention(x, x, x, **options)
    with jax.numpy_rank_promotion("raise"):
        found = gathered(x, **options)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_ids_and_lengths_of_any_integers_are_those_of_int32():
    x = jax.random.normal(jax.random.key(0), (1, 6, 2, 4))
    # As "no limit", a length beyond int32 hid everything once.
    everything = gathered(x)
    for dtype in (np.int64, np.uint32):
        limit = np.array([np.iinfo(dtype).max], dtype)
        found = gathered(x, key_value_seq_lengths=limit)
        np.testing.assert_array_equal(found, everything)
    ids = np.array([[0, 0, 1, 1, 2, 2]])
    np.testing.assert_array_equal(
        gathered(x, query_segment_ids=ids.astype(np.uint32)),
        gathered(x, query_segment_ids=ids.astype(np.int32)),
    )
    # Of equal low 32 bits, two documents became one.
    with pytest.raises(ValueError, match=r"has the number 8589934592, .* pass int32"):
        gathered(x, query_segment_ids=ids << 32)


@pytest.mark.parametrize(
    ("dtype", "low", "cap", "strategy"),
    [
        ("float32", -60_000, None, "ring"),
        ("float32", jnp.finfo("float32").min, None, "ulysses"),
        # No cap shows what it hides.
        ("float32", -1e9, 2.0, "ring"),
        ("float16", jnp.finfo("float16").min, None, "ring"),
        ("bfloat16", jnp.finfo("bfloat16").min, None, "ring"),
    ],
)
def test_a_low_bias_hides_keys_as_a_mask_does(dtype, low, cap, strategy):
    *arrays, grads = split.inputs((2, 12, 4, 8))
    # Rows 4 and 5 see nothing.
    seen = np.random.default_rng(5).random((1, 1, 12, 12)) < 0.6
    seen[..., 4:6, :] = False
    bias = jnp.where(seen, 0, low).astype(dtype)
    given = dense.Options(bias=bias, cap=cap)
    found = split.attend(*arrays, given, grads, size=2, strategy=strategy)
    meant = dense.Options(bias=0.0 * seen, mask=seen, cap=cap)
    expected = dense.attention(*arrays, meant, grads)
    # The gradient of a short bias is as short.
    split.assert_close(found, expected, 1e-5 if dtype == "float32" else 1e-2)
    split.assert_close(found[:5], expected, 1e-5)
    assert not found.out[:, 4:6].any()


def test_a_large_bias_that_is_above_is_added():
    """As in jax.nn, which has the same digits."""
    block = split.inputs((2, 12, 4, 8))[:3]
    rows = np.random.default_rng(7).normal(size=(1, 1, 12, 12))
    bias = jnp.asarray(rows - 1000, "float32")
    out = jaxcomm.dot_product_attention(
        *block, bias, axis_name="context", mesh=split.ring_over(2)
    )
    expected = jax.nn.dot_product_attention(*block, bias)
    np.testing.assert_allclose(out, expected, atol=1e-3)
    assert np.abs(out).min() > 0
