"""The primitive of a hop: jax.vmap, and what it is on each platform."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hops import Case, arrays_of

from jaxcomm.attention.kernels.operands import HopConfig, Operands
from jaxcomm.attention.kernels.primitive import hop_backward, hop_forward
from jaxcomm.attention.mask import Mask, Tokens

# All that a hop can have; the mapped dimension is COUNT such hops.
COUNT = 3
CASE = Case(
    batch=2, queries=6, keys=6, heads=4, key_heads=2, head_size=8, right=0,
    documents=2, has_slopes=True, bias=(1, 4, 6), dropout_rate=0.2, dtype="float32",
)  # fmt: skip


def _stacked():
    """Operands and what else the backward pass takes, each COUNT times."""
    operands, config, grad = arrays_of(CASE)
    rows = grad[..., 0]
    args = operands, grad, rows, rows / 2, grad
    order = [0, 2, 1]  # Every one has other numbers.

    def stack(x):
        rolled = [jnp.roll(x, shift, x.ndim - 1) for shift in order]
        return jnp.stack(rolled)

    return jax.tree.map(stack, args), config


def _both(config, operands, *others):
    forward = hop_forward(operands, config=config)
    return forward, hop_backward(operands, *others, config=config)


@pytest.mark.parametrize(
    "unmapped", ["nothing", "keys and bias", "query and positions"]
)
def test_vmap_is_one_by_one(unmapped):
    args, config = _stacked()
    both = functools.partial(_both, config)
    dims = jax.tree.map(lambda x: 0, args)
    operands, of = args[0], dims[0]
    if unmapped == "keys and bias":
        terms = operands.terms._replace(bias=operands.terms.bias[0])
        operands = operands._replace(
            key=operands.key[0], value=operands.value[0], terms=terms
        )
        of = of._replace(key=None, value=None, terms=of.terms._replace(bias=None))
    elif unmapped == "query and positions":
        queries, keys = (
            x._replace(positions=x.positions[0])
            for x in (operands.queries, operands.keys)
        )
        operands = operands._replace(
            query=operands.query[0], queries=queries, keys=keys
        )
        of = of._replace(
            query=None,
            queries=of.queries._replace(positions=None),
            keys=of.keys._replace(positions=None),
        )
    args, dims = (operands, *args[1:]), (of, *dims[1:])
    found = jax.jit(jax.vmap(both, in_axes=dims))(*args)

    def one(i):
        leaves, tree = jax.tree.flatten(args)
        mapped = jax.tree.leaves(dims, is_leaf=lambda x: x is None)
        return jax.tree.unflatten(
            tree,
            [x if dim is None else x[i] for x, dim in zip(leaves, mapped, strict=True)],
        )

    expected = [jax.jit(both)(*one(i)) for i in range(COUNT)]
    expected = jax.tree.map(lambda *xs: jnp.stack(xs), *expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        found,
        expected,
    )


@pytest.mark.parametrize(("platform", "tokens"), [("cpu", 128), ("cuda", 512)])
def test_a_platform_has_tiles_of_its_own_size(platform, tokens):
    config = HopConfig(1.0, Mask(None, 0, 1024, 1024), (1024,), (1024,))
    config = dataclasses.replace(config, implementation="xla")
    x = jax.ShapeDtypeStruct((1, 1024, 1, 8), jnp.float32)
    at = Tokens(jnp.arange(1024, dtype=jnp.int32))

    def forward(x):
        return hop_forward(Operands(x, x, x, at, at), config=config)

    traced = jax.jit(forward).trace(x)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert f"tensor<{tokens}x{tokens}xf32>" in text
