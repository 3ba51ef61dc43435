import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from split import on_ranks

from jaxcomm.attention.layout import Layout

SPLIT = jax.P(None, "context")
attend = functools.partial(on_ranks, is_causal=True)


def _value_and_grads(function, arrays, grad):
    """Return the value, and the gradients of its product with ``grad``."""

    @jax.jit
    def run(arrays, grad):
        out, transpose = jax.vjp(function, *arrays)
        return out, *transpose(grad)

    return run(arrays, grad)


@pytest.mark.parametrize("check_vma", [True, False])
def test_values_and_gradients_hold_with_and_without_checked_types(
    ring, dense, inputs, assert_close, check_vma
):
    query, key, value, grads = inputs((1, 26, 4, 8), (1, 26, 2, 8))
    options = {"is_causal": True, "grads": grads}
    found = ring(query, key, value, size=4, check_vma=check_vma, **options)
    assert_close(found, dense(query, key, value, **options), 1e-5)


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0)])
def test_the_residual_alone_has_a_gradient_and_so_has_the_output(
    ring, dense, inputs, assert_close, weights
):
    query, key, value, grads = inputs((1, 26, 4, 8), (1, 26, 2, 8))
    options = {
        "is_causal": True,
        "grads": (grads[0] * weights[0], grads[1] * weights[1]),
    }
    found = ring(query, key, value, size=4, **options)
    assert_close(found, dense(query, key, value, **options), 1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_keys_replicated_over_a_data_axis_get_the_sum_of_its_gradients(
    dense, inputs, assert_close, check_vma
):
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "context"), auto)
    query, key, value, grads = inputs((2, 16, 4, 8), (1, 16, 2, 8))
    over_both = jax.P("data", "context")

    whole = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(over_both, SPLIT, SPLIT),
        out_specs=over_both,
        check_vma=check_vma,
    )
    found = _value_and_grads(whole, (query, key, value), grads[0])
    twice = [jnp.concatenate([x, x]) for x in (key, value)]
    no_lse = (grads[0], jnp.zeros_like(grads[1]))
    expected = dense(query, *twice, is_causal=True, grads=no_lse)
    summed = [x.sum(0, keepdims=True) for x in expected[3:5]]
    out, *gradients = found
    expected = (expected.out, None, expected.grad_query, *summed)
    assert_close((out, None, *gradients), expected, 1e-5)


def test_a_query_replicated_over_the_ring_gets_the_sum_of_its_gradients(
    mesh_of, dense, inputs, assert_close
):
    query, key, value, grads = inputs((1, 4, 2, 8), (1, 16, 2, 8))
    attend_all = on_ranks
    whole = jax.shard_map(
        attend_all, mesh=mesh_of(4), in_specs=(jax.P(), SPLIT, SPLIT), out_specs=SPLIT
    )
    # Each rank computes the same rows from the same query; their gradients differ.
    grad = jnp.concatenate([grads[0] * rank for rank in range(4)], 1)
    _, found, _, _ = _value_and_grads(whole, (query, key, value), grad)
    no_lse = jnp.zeros_like(grads[1])
    expected = dense(query, key, value, grads=(grads[0] * 6, no_lse)).grad_query
    np.testing.assert_allclose(found, expected, atol=1e-4)


def _whole(mesh, local):
    return jax.shard_map(local, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT)


@pytest.fixture(scope="module")
def plain(mesh_of, inputs):
    """A mesh, inputs, a gradient, and the results without any transform."""
    mesh = mesh_of(4)
    query, key, value, grads = inputs((2, 16, 4, 8), (2, 16, 2, 8))
    arrays = query, key, value
    results = _value_and_grads(_whole(mesh, attend), arrays, grads[0])
    # Done before the communicators are closed, which each test begins with.
    return mesh, arrays, grads[0], jax.device_get(results)


def _assert_same(found, expected):
    # The same operations in another grouping: a few roundings apart.
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
        found,
        expected,
    )


def test_remat_changes_nothing(plain):
    mesh, arrays, grad, expected = plain
    whole = _whole(mesh, jax.checkpoint(attend))
    _assert_same(_value_and_grads(whole, arrays, grad), expected)


def test_vmap_inside_and_outside_of_the_ring_change_nothing(plain):
    mesh, arrays, grad, expected = plain

    def one(query, key, value):
        return attend(query[None], key[None], value[None])[0]

    def outside(*arrays):
        stacked = [x[:, None] for x in arrays]
        return jax.vmap(_whole(mesh, attend))(*stacked)[:, 0]

    for function in (_whole(mesh, jax.vmap(one)), outside):
        _assert_same(_value_and_grads(function, arrays, grad), expected)


def test_vmap_over_queries_only(mesh_of, inputs):
    query, key, value, _ = inputs((1, 16, 2, 8))
    queries = jnp.stack([query, 2 * query])

    def local(queries, key, value):
        return jax.vmap(attend, in_axes=(0, None, None))(queries, key, value)

    split = jax.P(None, None, "context")
    found = jax.jit(
        jax.shard_map(
            local, mesh=mesh_of(4), in_specs=(split, SPLIT, SPLIT), out_specs=split
        )
    )(queries, key, value)
    whole = jax.jit(_whole(mesh_of(4), attend))
    _assert_same(found, jnp.stack([whole(q, key, value) for q in queries]))


def test_scan_over_layers_equals_the_layers_one_by_one(mesh_of, inputs):
    x = inputs((1, 16, 2, 8))[0]
    scales = jnp.array([0.5, 1.0, 1.5], jnp.float32)

    def layer(x, scale):
        return x + attend(scale * x, x, x)

    def scanned(x):
        return jax.lax.scan(lambda x, s: (layer(x, s), None), x, scales)[0]

    def one_by_one(x):
        for scale in scales:
            x = layer(x, scale)
        return x

    def results(local):
        return _value_and_grads(_whole(mesh_of(4), local), (x,), x)

    _assert_same(results(scanned), results(one_by_one))


@pytest.mark.parametrize("axes", [("host", "device"), ("device", "host")], ids=str)
def test_a_tuple_of_axes_is_one_ring(inputs, dense, axes):
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("host", "device"), auto)
    query, key, value, _ = inputs((1, 32, 2, 8))
    local = functools.partial(attend, axis_name=axes)
    split = jax.P(None, axes)
    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split))
    expected = dense(query, key, value, is_causal=True).out
    np.testing.assert_allclose(found(query, key, value), expected, atol=1e-5)


def _second_derivatives(function, arrays):
    """Return two of them: forward over reverse, and reverse over reverse."""
    along = tuple(jnp.cos(x) for x in arrays)

    def loss(arrays):
        return jnp.sin(function(*arrays)).sum()

    gradient = jax.grad(loss)

    def along_gradient(arrays):
        return sum(map(jnp.vdot, gradient(arrays), along))

    forward = jax.jvp(gradient, (arrays,), (along,))[1]
    return jax.tree.leaves((forward, jax.grad(along_gradient)(arrays)))


@pytest.fixture(scope="module")
def second_derivatives_of_dense(inputs):
    """Inputs, and the second derivatives of dense attention there."""
    arrays = inputs((1, 8, 2, 4))[:3]
    dense = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    return arrays, jax.jit(lambda arrays: _second_derivatives(dense, arrays))(arrays)


@pytest.mark.parametrize("schedule", ["contiguous", "zigzag", "striped"])
def test_second_derivatives_are_those_of_dense_attention(
    mesh_of, second_derivatives_of_dense, schedule
):
    """Also forward over reverse, where a row sees no key of a block."""
    arrays, expected = second_derivatives_of_dense
    local = functools.partial(attend, schedule=schedule)

    def of_ring(*arrays):
        layout = Layout(schedule, 4, arrays[0].shape[1])
        dealt, positions = layout.reorder(arrays)
        return layout.restore(_whole(mesh_of(4), local)(*dealt), positions)

    found = jax.jit(lambda arrays: _second_derivatives(of_ring, arrays))(arrays)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_axes_left_to_xla_change_nothing(inputs, dense):
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "context"), auto)
    query, key, value, _ = inputs((2, 32, 2, 8))
    found = jax.jit(
        jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=SPLIT,
            out_specs=SPLIT,
            axis_names={"context"},
        )
    )
    expected = dense(query, key, value, is_causal=True).out
    np.testing.assert_allclose(found(query, key, value), expected, atol=1e-5)


def test_eager_equals_jit(plain):
    mesh, arrays, _, _ = plain
    whole = _whole(mesh, attend)
    _assert_same(whole(*arrays), jax.jit(whole)(*arrays))
