"""JAX's transforms of a ring, and meshes of several axes."""

import functools

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split
from dense import Options
from split import SPLIT, on_ranks, sharded

from jaxcomm.attention.layout import Layout
from jaxcomm.attention.ring_attention import ring_attention

CAUSAL = Options(is_causal=True)
attend = functools.partial(on_ranks, is_causal=True)


def _mesh(**axes):
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), auto)


@pytest.mark.parametrize("check_vma", [True, False])
def test_keys_replicated_over_a_data_axis_get_the_sum_of_its_gradients(check_vma):
    query, key, value, (grad, grad_lse) = split.inputs((2, 16, 4, 8), (1, 16, 2, 8))
    both = jax.P("data", "context")
    specs, mesh = (both, SPLIT, SPLIT), _mesh(data=2, context=4)
    whole = sharded(attend, None, specs, both, mesh, check_vma=check_vma)
    out, *gradients = split.results(whole, (query, key, value), grad)
    twice = [jnp.concatenate([x, x]) for x in (key, value)]
    grads = grad, jnp.zeros_like(grad_lse)
    expected = dense.attention(query, *twice, CAUSAL, grads)
    summed = [x.sum(0, keepdims=True) for x in expected[3:5]]
    expected = (expected.out, None, expected.grad_query, *summed)
    split.assert_close((out, None, *gradients), expected)


def test_a_query_replicated_over_the_ring_gets_the_sum_of_its_gradients():
    *arrays, (grad, grad_lse) = split.inputs((1, 4, 2, 8), (1, 16, 2, 8))
    whole = sharded(on_ranks, 4, (jax.P(), SPLIT, SPLIT))
    # Each rank computes the same rows from the same query; their gradients differ.
    of_ranks = jnp.concatenate([grad * rank for rank in range(4)], 1)
    _, found, *_ = split.results(whole, arrays, of_ranks)
    grads = grad * 6, jnp.zeros_like(grad_lse)
    expected = dense.attention(*arrays, split.PLAIN, grads).grad_query
    np.testing.assert_allclose(found, expected, atol=1e-4)


def _vmap_outside():
    whole = jax.vmap(sharded(attend))
    return lambda *arrays: whole(*(x[:, None] for x in arrays))[:, 0]


TRANSFORMED = {
    "unchecked": lambda: sharded(attend, check_vma=False),
    "remat": lambda: sharded(jax.checkpoint(attend)),
    "vmap inside": lambda: sharded(
        jax.vmap(lambda *x: attend(*(y[None] for y in x))[0])
    ),
    "vmap outside": _vmap_outside,
    "scan": lambda: sharded(
        lambda *x: jax.lax.scan(lambda c, _: (c, attend(*x)), 0, None, 1)[1][0]
    ),
    # A ring of two axes, whose first is the mesh's last; an axis left to XLA.
    "two axes": lambda: sharded(
        functools.partial(attend, axis_name=("device", "host")), None,
        *[jax.P(None, ("device", "host"))] * 2, _mesh(host=2, device=4),
    ),
    "an axis of XLA's": lambda: sharded(
        functools.partial(attend, backend="xla"), mesh=_mesh(data=2, context=4),
        axis_names={"context"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("transformed", TRANSFORMED)
def test_transforms_and_meshes_change_nothing(transformed):
    *arrays, (grad, _) = split.inputs((2, 8, 4, 8), (2, 8, 2, 8))
    found = split.results(TRANSFORMED[transformed](), arrays, grad)
    split.assert_results(found, arrays, grad, CAUSAL)


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
    ("schedule", "ids", "mode"),
    [
        ("zigzag", None, "forward over reverse"),
        # Rings of two or three ranks refuse it. Hops that no rank sees are not sent,
        # which is known when it runs.
        ("contiguous", [0, 0, 0, 1, 2, 2, 2, 2], "reverse over reverse"),
        pytest.param(
            "contiguous", None, "reverse over reverse", marks=pytest.mark.thorough
        ),
    ],
)  # fmt: skip
def test_second_derivatives_are_those_of_dense_attention(schedule, ids, mode):
    """Also where a row sees no key of a block."""
    arrays = split.inputs((1, 8, 2, 4))[:3]
    ids = ids and jnp.array([ids])
    mask = None if ids is None else (ids[0][:, None] == ids)[None]
    plain = functools.partial(jax.nn.dot_product_attention, is_causal=True, mask=mask)

    def local(tokens, *arrays):
        return ring_attention(
            *arrays, "context", tokens, is_causal=True, strategy="ring"
        )

    whole = sharded(local, 4, SPLIT)

    def of_ring(*arrays):
        dealt, tokens = Layout(schedule, 4, 8).reorder(arrays, segment_ids=ids)
        return tokens.restore(whole(tokens, *dealt))

    found, expected = (
        jax.jit(functools.partial(_second_derivatives, function, mode))(arrays)
        for function in (of_ring, plain)
    )
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
