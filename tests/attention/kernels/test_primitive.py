"""The primitive of a hop: jax.vmap, and what it is on each platform."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hops import Case, hop_of

from jaxcomm.attention.kernels.kernel import Saved
from jaxcomm.attention.kernels.primitive import hop_backward, hop_forward
from jaxcomm.attention.kernels.xla.kernel import XLA

# All that a hop can have; the mapped dimension is COUNT such hops.
COUNT = 3
CASE = Case(
    batch=2, queries=6, keys=6, heads=4, key_heads=2, head_size=8, right=0,
    documents=2, ranges=("queries", "keys"), has_slopes=True, bias=(1, 4, 6),
    dropout_rate=0.2, dtype="float32",
)  # fmt: skip


def _stacked():
    """A hop and what else the backward pass takes, each COUNT times."""
    hop, grad = hop_of(CASE)
    rows = grad[..., 0]
    args = hop, Saved(grad, grad, rows, rows / 2)
    order = [0, 2, 1]  # Every one has other numbers.

    def stack(x):
        rolled = [jnp.roll(x, shift, x.ndim - 1) for shift in order]
        return jnp.stack(rolled)

    return jax.tree.map(stack, args)


def _both(hop, saved):
    return hop_forward(hop), hop_backward(hop, saved)


UNMAPPED = {
    "nothing": (),
    "keys and bias": (".key", ".value", ".scores.bias"),
    "query and positions": (
        ".query", ".pairs.queries.positions", ".pairs.keys.positions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("unmapped", UNMAPPED)
def test_vmap_is_one_by_one(unmapped):
    args = _stacked()

    def is_mapped(path):
        """Say whether an array is, by its name in the hop."""
        name = jax.tree_util.keystr(path)
        return not (name.startswith("[0]") and name[3:] in UNMAPPED[unmapped])

    dims = jax.tree_util.tree_map_with_path(
        lambda path, _: 0 if is_mapped(path) else None, args
    )
    mapped = [dim for dim in jax.tree.leaves(dims) if dim is not None]
    assert len(jax.tree.leaves(args)) - len(mapped) == len(UNMAPPED[unmapped])
    args = jax.tree_util.tree_map_with_path(
        lambda path, x: x if is_mapped(path) else x[0], args
    )
    found = jax.jit(jax.vmap(_both, in_axes=dims))(*args)
    one_by_one = jax.jit(_both)
    expected = [
        one_by_one(
            *jax.tree_util.tree_map_with_path(
                lambda path, x, i=i: x[i] if is_mapped(path) else x, args
            )
        )
        for i in range(COUNT)
    ]
    expected = jax.tree.map(lambda *xs: jnp.stack(xs), *expected)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, found, expected)


def test_vmap_over_nothing_gives_nothing():
    none, one = jax.tree.map(lambda x: x[:0], _stacked()), hop_of(CASE)[0]
    _, grads = jax.eval_shape(jax.vmap(_both), *none)
    assert grads.query.shape == (0, *one.query.shape)
    assert grads.bias.shape == (0, *one.scores.bias.shape)


@pytest.mark.parametrize(("platform", "tokens"), [("cpu", 128), ("cuda", 512)])
def test_a_platform_has_tiles_of_its_own_size(platform, tokens):
    hop, _ = hop_of(Case(queries=1024, keys=1024, dtype="float32"))
    traced = jax.jit(hop_forward).trace(hop.replace(kernels=(XLA,)))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert f"tensor<{tokens}x{tokens}xf32>" in text
