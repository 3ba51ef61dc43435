"""The twin of jax.nn.dot_product_attention for plain jit, in natural order."""

import contextlib

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split

import jaxcomm


@pytest.mark.parametrize(("tokens", "has_documents"), [(32, False), (29, True)])
def test_natural_order_in_and_out_with_gradients(
    assert_close, make_mesh, tokens, has_documents
):
    mesh = make_mesh(data=2, context=4)
    *arrays, grads = split.random_inputs((2, tokens, 4, 8), (2, tokens, 2, 8))
    rng = np.random.default_rng(0)
    bias = jnp.asarray(rng.standard_normal((1, 4, tokens, tokens)), jnp.float32)
    ids = np.sort(rng.integers(0, 3, (2, tokens)), 1) if has_documents else None

    def attend(query, key, value, bias):
        return jaxcomm.dot_product_attention(
            query, key, value, bias, mesh=mesh, axis_name="context", is_causal=True,
            query_segment_ids=ids, return_residual=True,
        )  # fmt: skip

    (out, lse), transpose = jax.vjp(jax.jit(attend), *arrays, bias)
    options = dense.Options(is_causal=True, bias=bias, query_ids=ids)
    expected = dense.attention(*arrays, options, grads)
    assert_close((out, lse, *transpose(grads)), expected, 1e-5)


def test_meshes_of_explicit_axes_and_a_window():
    x = jax.random.normal(jax.random.key(0), (2, 61, 4, 8))
    expected = jax.nn.dot_product_attention(
        x, x, x, is_causal=True, local_window_size=(7, 0)
    )
    with jax.set_mesh(jax.make_mesh((8,), ("context",))):
        found = jaxcomm.dot_product_attention(
            x, x, x, axis_name="context", is_causal=True, local_window_size=(7, 0)
        )
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("is_set", [True, False])
def test_axes_that_split_batch_and_heads_stay(is_set):
    """Under jax.set_mesh; else the mesh is named, and other axes split nothing."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "context", "model"))
    arrays = split.random_inputs((2, 6, 2, 4), (2, 6, 2, 4))[:3]

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


def test_outside_of_jit_it_is_one_program_compiled_once(mesh_of):
    compiled = []

    def listen(event, seconds, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(seconds)

    x = jax.random.normal(jax.random.key(0), (1, 12, 2, 8))

    def attend(**options):
        return jaxcomm.dot_product_attention(
            x, x, x, mesh=mesh_of(2), axis_name="context", is_causal=True, **options
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


@pytest.fixture
def attend(mesh_of):
    def gathered(x, **options):
        return jaxcomm.dot_product_attention(
            x, x, x, mesh=mesh_of(2), axis_name="context", strategy="all_gather",
            **options,
        )  # fmt: skip

    return gathered


def test_a_mask_and_a_bias_of_fewer_dimensions_broadcast_as_in_jax_nn(attend):
    x = jax.random.normal(jax.random.key(0), (2, 5, 2, 4))
    # Each token sees itself: where a row sees no key, jax.nn gives a mean.
    sees = jax.random.bernoulli(jax.random.key(1), 0.5, (5, 5)) | jnp.eye(5, dtype=bool)
    options = {"mask": sees, "bias": jnp.arange(5.0)}
    expected = jax.nn.dot_product_attention(x, x, x, **options)
    np.testing.assert_allclose(attend(x, **options), expected, atol=1e-5)


def test_ids_and_lengths_of_any_integers_are_those_of_int32(attend):
    x = jax.random.normal(jax.random.key(0), (1, 6, 2, 4))
    # As "no limit", a length beyond int32 hid everything once.
    everything = attend(x)
    for dtype in (np.int64, np.uint32):
        limit = np.array([np.iinfo(dtype).max], dtype)
        np.testing.assert_array_equal(
            attend(x, key_value_seq_lengths=limit), everything
        )
    ids = np.array([[0, 0, 1, 1, 2, 2]])
    np.testing.assert_array_equal(
        attend(x, query_segment_ids=ids.astype(np.uint32)),
        attend(x, query_segment_ids=ids.astype(np.int32)),
    )
    # Of equal low 32 bits, two documents became one.
    with pytest.raises(ValueError, match=r"has the number 8589934592, .* pass int32"):
        attend(x, query_segment_ids=ids << 32)
