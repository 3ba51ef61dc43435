"""The twin of jax.nn.dot_product_attention for plain jit, in natural order."""

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split

import jaxcomm


@pytest.mark.parametrize("tokens", [32, 29])
@pytest.mark.parametrize("has_documents", [False, True])
def test_natural_order_in_and_out_with_gradients(make_mesh, tokens, has_documents):
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
    split.assert_close((out, lse, *transpose(grads)), expected, 1e-5)


def test_float64_without_implicit_promotion(make_mesh):
    """The tests switch implicit promotion off; with x64 numbers are int64."""
    mesh = make_mesh(context=4)
    *arrays, _ = split.random_inputs((1, 16, 2, 4), (1, 16, 2, 4))
    with jax.enable_x64(True):
        arrays = [x.astype("float64") for x in arrays]

        def attend(*arrays):
            return jaxcomm.dot_product_attention(
                *arrays, mesh=mesh, axis_name="context", is_causal=True
            )

        out, transpose = jax.vjp(attend, *arrays)
        grads = out, jnp.zeros(out.shape[:3], "float64")
        options = dense.Options(is_causal=True)
        expected = dense.attention(*arrays, options, grads)
        split.assert_close(
            (out, None, *transpose(out)), expected._replace(lse=None), 1e-12
        )


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


def test_batch_and_heads_split_over_explicit_axes_stay_split():
    arrays = split.random_inputs((2, 6, 2, 4), (2, 6, 2, 4))[:3]

    def loss(attend):
        return lambda q, k, v: (attend(q, k, v) ** 2).sum()

    def ours(q, k, v):
        out = jaxcomm.dot_product_attention(
            q, k, v, axis_name="context", strategy="all_gather"
        )
        assert jax.typeof(out).sharding.spec == jax.P("data", "context", "model", None)
        return out

    expected = jax.grad(loss(jax.nn.dot_product_attention), (0, 1, 2))(*arrays)
    with jax.set_mesh(jax.make_mesh((2, 2, 2), ("data", "context", "model"))):
        placed = [jax.reshard(x, jax.P("data", None, "model")) for x in arrays]
        found = jax.jit(jax.grad(loss(ours), (0, 1, 2)))(*placed)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_without_a_mesh_in_the_context_other_explicit_axes_split_nothing():
    mesh = jax.make_mesh((2, 4), ("data", "context"))
    arrays = split.random_inputs((2, 8, 2, 4), (2, 8, 2, 4))[:3]

    def loss(attend):
        return lambda q, k, v: (attend(q, k, v) ** 2).sum()

    def ours(q, k, v):
        return jaxcomm.dot_product_attention(q, k, v, axis_name="context", mesh=mesh)

    expected = jax.grad(loss(jax.nn.dot_product_attention), (0, 1, 2))(*arrays)
    sharding = jax.NamedSharding(mesh, jax.P("data", "context"))
    placed = [jax.device_put(x, sharding) for x in arrays]
    found = jax.jit(jax.grad(loss(ours), (0, 1, 2)))(*placed)
    for one, other in zip(found, expected, strict=True):
        assert one.sharding.spec == jax.P("data", "context", None, None)
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_outside_of_jit_it_is_one_program_compiled_once(make_mesh):
    compiled = []

    def listen(event, seconds, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(seconds)

    mesh = make_mesh(context=2)
    x = jax.random.normal(jax.random.key(0), (1, 12, 2, 8))
    window = np.array([3, 0])  # No key of a cache: refused, or compiled in parts.
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        first, second = (
            jaxcomm.dot_product_attention(
                x, x, x, mesh=mesh, axis_name="context", is_causal=True
            )
            for _ in range(2)
        )
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert 1 <= len(compiled) <= 3
    jax.block_until_ready((first, second))
    # It names a communicator that is closed then, and is compiled again.
    jaxcomm.finalize()
    third = jaxcomm.dot_product_attention(
        x, x, x, mesh=mesh, axis_name="context", is_causal=True
    )
    np.testing.assert_array_equal(first, third)
    np.testing.assert_array_equal(first, second)
    expected = jax.nn.dot_product_attention(x, x, x, is_causal=True)
    np.testing.assert_allclose(first, expected, atol=1e-5)
    with pytest.raises(TypeError, match="local_window_size"):
        jaxcomm.dot_product_attention(
            x, x, x, mesh=mesh, axis_name="context", local_window_size=window
        )


def test_without_a_mesh_the_error_says_what_to_do():
    x = jnp.ones((1, 8, 2, 4))
    with pytest.raises(ValueError, match=r"is not in the mesh .*under jax\.set_mesh"):
        jaxcomm.dot_product_attention(x, x, x, axis_name="context")


def test_a_mask_and_a_bias_of_fewer_dimensions_broadcast_as_in_jax_nn(make_mesh):
    mesh = make_mesh(context=2)
    x = jax.random.normal(jax.random.key(0), (2, 5, 2, 4))
    # Each token sees itself: where a row sees no key, jax.nn gives a mean.
    sees = jax.random.bernoulli(jax.random.key(1), 0.5, (5, 5)) | jnp.eye(5, dtype=bool)
    options = {"mask": sees, "bias": jnp.arange(5.0)}
    found = jaxcomm.dot_product_attention(
        x, x, x, mesh=mesh, axis_name="context", strategy="all_gather", **options
    )
    expected = jax.nn.dot_product_attention(x, x, x, **options)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_ids_and_lengths_of_any_integers_are_those_of_int32(make_mesh):
    mesh = make_mesh(context=2)
    x = jax.random.normal(jax.random.key(0), (1, 6, 2, 4))

    def attend(**options):
        return jaxcomm.dot_product_attention(
            x, x, x, mesh=mesh, axis_name="context", strategy="all_gather", **options
        )

    # As "no limit", a length beyond int32 hid everything once.
    everything = attend()
    for dtype in (np.int64, np.uint32):
        limit = np.array([np.iinfo(dtype).max], dtype)
        np.testing.assert_array_equal(attend(key_value_seq_lengths=limit), everything)
    ids = np.array([[0, 0, 1, 1, 2, 2]])
    np.testing.assert_array_equal(
        attend(query_segment_ids=ids.astype(np.uint32)),
        attend(query_segment_ids=ids.astype(np.int32)),
    )
    # Of equal low 32 bits, two documents became one.
    with pytest.raises(ValueError, match=r"has the number 8589934592, .* pass int32"):
        attend(query_segment_ids=ids << 32)
