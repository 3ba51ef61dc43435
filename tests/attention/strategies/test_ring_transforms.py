"""JAX's transforms of a ring, and meshes of several axes."""

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


def _mesh(**axes):
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), auto)


@pytest.mark.parametrize("check_vma", [True, False])
def test_keys_replicated_over_a_data_axis_get_the_sum_of_its_gradients(
    sharded, dense, inputs, assert_close, check_vma
):
    query, key, value, grads = inputs((2, 16, 4, 8), (1, 16, 2, 8))
    over_both = jax.P("data", "context")
    whole = sharded(
        attend, None, (over_both, SPLIT, SPLIT), over_both, _mesh(data=2, context=4),
        check_vma=check_vma,
    )  # fmt: skip
    out, *gradients = _value_and_grads(whole, (query, key, value), grads[0])
    twice = [jnp.concatenate([x, x]) for x in (key, value)]
    no_lse = (grads[0], jnp.zeros_like(grads[1]))
    expected = dense(query, *twice, is_causal=True, grads=no_lse)
    summed = [x.sum(0, keepdims=True) for x in expected[3:5]]
    expected = (expected.out, None, expected.grad_query, *summed)
    assert_close((out, None, *gradients), expected, 1e-5)


def test_a_query_replicated_over_the_ring_gets_the_sum_of_its_gradients(
    sharded, dense, inputs
):
    query, key, value, grads = inputs((1, 4, 2, 8), (1, 16, 2, 8))
    whole = sharded(on_ranks, 4, (jax.P(), SPLIT, SPLIT))
    # Each rank computes the same rows from the same query; their gradients differ.
    grad = jnp.concatenate([grads[0] * rank for rank in range(4)], 1)
    _, found, _, _ = _value_and_grads(whole, (query, key, value), grad)
    no_lse = jnp.zeros_like(grads[1])
    expected = dense(query, key, value, grads=(grads[0] * 6, no_lse)).grad_query
    np.testing.assert_allclose(found, expected, atol=1e-4)


def _vmap_outside(sharded):
    whole = jax.vmap(sharded(attend))
    return lambda *arrays: whole(*(x[:, None] for x in arrays))[:, 0]


TRANSFORMED = {
    "unchecked": lambda sharded: sharded(attend, check_vma=False),
    "remat": lambda sharded: sharded(jax.checkpoint(attend)),
    "vmap inside": lambda sharded: sharded(
        jax.vmap(lambda *x: attend(*(y[None] for y in x))[0])
    ),
    "vmap outside": _vmap_outside,
    "scan": lambda sharded: sharded(
        lambda *x: jax.lax.scan(lambda c, _: (c, attend(*x)), 0, None, 1)[1][0]
    ),
}


@pytest.mark.parametrize("transformed", TRANSFORMED)
def test_transforms_change_nothing(sharded, inputs, dense, assert_close, transformed):
    *arrays, (grad, grad_lse) = inputs((2, 8, 4, 8), (2, 8, 2, 8))
    whole = TRANSFORMED[transformed](sharded)
    out, *gradients = _value_and_grads(whole, arrays, grad)
    no_lse = (grad, jnp.zeros_like(grad_lse))
    expected = dense(*arrays, is_causal=True, grads=no_lse)
    assert_close((out, None, *gradients), expected._replace(lse=None), 1e-5)


def test_vmap_over_queries_only(sharded, inputs, dense):
    query, key, value, _ = inputs((2, 1, 16, 2, 8))
    mapped = jax.vmap(attend, in_axes=(0, None, None))
    split = jax.P(None, None, "context")
    whole = jax.jit(sharded(mapped, 4, (split, SPLIT, SPLIT), split))
    for q, out in zip(query, whole(query, key[0], value[0]), strict=True):
        expected = dense(q, key[0], value[0], is_causal=True).out
        np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("mesh", "axes"),
    [
        # A ring of two axes, whose first is the mesh's last; an axis left to XLA.
        ({"host": 2, "device": 4}, ("device", "host")),
        ({"data": 2, "context": 4}, "context"),
    ],
    ids=str,
)
def test_meshes_of_several_axes(sharded, inputs, dense, mesh, axes):
    query, key, value, _ = inputs((2, 32, 2, 8))
    local, spec = functools.partial(attend, axis_name=axes), jax.P(None, axes)
    names = {axes} if isinstance(axes, str) else set(axes)
    whole = sharded(local, None, spec, spec, _mesh(**mesh), axis_names=names)
    expected = dense(query, key, value, is_causal=True).out
    np.testing.assert_allclose(jax.jit(whole)(query, key, value), expected, atol=1e-5)


def _second_derivatives(function, mode, arrays):
    along = tuple(jnp.cos(x) for x in arrays)

    def loss(arrays):
        return jnp.sin(function(*arrays)).sum()

    gradient = jax.grad(loss)

    def along_gradient(arrays):
        return sum(map(jnp.vdot, gradient(arrays), along))

    if mode == "forward over reverse":
        return jax.jvp(gradient, (arrays,), (along,))[1]
    return jax.grad(along_gradient)(arrays)


@pytest.mark.parametrize(
    ("schedule", "mode"),
    [
        ("zigzag", "reverse over reverse"),
        ("contiguous", "forward over reverse"),
        pytest.param("striped", "reverse over reverse", marks=pytest.mark.thorough),
        pytest.param("striped", "forward over reverse", marks=pytest.mark.thorough),
    ],
)
def test_second_derivatives_are_those_of_dense_attention(
    sharded, inputs, schedule, mode
):
    """Also where a row sees no key of a block."""
    arrays = inputs((1, 8, 2, 4))[:3]
    dense = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    local = functools.partial(attend, schedule=schedule)

    def of_ring(*arrays):
        layout = Layout(schedule, 4, arrays[0].shape[1])
        dealt, positions = layout.reorder(arrays)
        return layout.restore(sharded(local)(*dealt), positions)

    found, expected = (
        jax.jit(functools.partial(_second_derivatives, function, mode))(arrays)
        for function in (of_ring, dense)
    )
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_eager_is_right(sharded, inputs, dense):
    arrays = inputs((1, 8, 2, 4))[:3]
    expected = dense(*arrays, is_causal=True).out
    np.testing.assert_allclose(sharded(attend, 2)(*arrays), expected, atol=1e-5)
