"""The primitive of a hop: jax.vmap, and what it is on each platform."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.attention.kernels.operands import HopConfig, Operands, Terms
from jaxcomm.attention.kernels.primitive import hop_backward, hop_forward
from jaxcomm.attention.mask import Mask, Tokens

COUNT, BATCH, TOKENS = 3, 2, 6
CONFIG = HopConfig(1.0, Mask(None, 0, 9, 9), (TOKENS,), (TOKENS,), dropout_rate=0.2)


def _stacked():
    """Operands and what else the backward pass takes, each COUNT times."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal((COUNT, *shape)), jnp.float32)

    def tokens():
        at = jnp.asarray(rng.integers(0, 9, (COUNT, TOKENS)), jnp.int32)
        ids = jnp.asarray(rng.integers(0, 2, (COUNT, BATCH, TOKENS)), jnp.int32)
        return Tokens(at, ids)

    terms = Terms(
        normal(1, 4, TOKENS, TOKENS),
        normal(BATCH, 4),
        jnp.asarray(rng.integers(0, 99, (COUNT, BATCH, 4)), jnp.uint32),
    )
    query, grad, out = (normal(BATCH, TOKENS, 4, 8) for _ in range(3))
    key, value = (normal(BATCH, TOKENS, 2, 8) for _ in range(2))
    operands = Operands(query, key, value, tokens(), tokens(), terms)
    rows = [normal(BATCH, TOKENS, 4) for _ in range(2)]
    return operands, grad, *rows, out


def _both(operands, *others):
    forward = hop_forward(operands, config=CONFIG)
    return forward, hop_backward(operands, *others, config=CONFIG)


@pytest.mark.parametrize("unmapped", ["nothing", "keys", "bias", "positions", "query"])
def test_vmap_is_one_by_one(unmapped):
    args = _stacked()
    dims = jax.tree.map(lambda x: 0, args)
    operands, of = args[0], dims[0]
    if unmapped == "keys":
        operands = operands._replace(key=operands.key[0], value=operands.value[0])
        of = of._replace(key=None, value=None)
    elif unmapped == "bias":
        terms = operands.terms._replace(bias=operands.terms.bias[0])
        operands = operands._replace(terms=terms)
        of = of._replace(terms=of.terms._replace(bias=None))
    elif unmapped == "positions":
        queries, keys = (
            x._replace(positions=x.positions[0])
            for x in (operands.queries, operands.keys)
        )
        operands = operands._replace(queries=queries, keys=keys)
        of = of._replace(
            queries=of.queries._replace(positions=None),
            keys=of.keys._replace(positions=None),
        )
    elif unmapped == "query":
        operands = operands._replace(query=operands.query[0])
        of = of._replace(query=None)
    args, dims = (operands, *args[1:]), (of, *dims[1:])
    found = jax.jit(jax.vmap(_both, in_axes=dims))(*args)

    def one(i):
        leaves, tree = jax.tree.flatten(args)
        mapped = jax.tree.leaves(dims, is_leaf=lambda x: x is None)
        return jax.tree.unflatten(
            tree,
            [x if dim is None else x[i] for x, dim in zip(leaves, mapped, strict=True)],
        )

    expected = [jax.jit(_both)(*one(i)) for i in range(COUNT)]
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
