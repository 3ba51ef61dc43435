"""cuDNN's part of a hop; what a whole ring gives is in ``test_fused_ring.py``."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.attention.kernels import cudnn, fused, primitive, xla
from jaxcomm.attention.kernels.operands import HopConfig, Operands
from jaxcomm.attention.mask import Mask, Tokens
from jaxcomm.attention.schedules.block import Block
from jaxcomm.attention.schedules.registry import SCHEDULES


def test_a_causal_block_must_be_a_square():
    with pytest.raises(
        ValueError, match=r"queries \(0, 4\) and keys \(0, 3\) with is_"
    ):
        Block((0, 4), (0, 3), is_causal=True)
    with pytest.raises(ValueError, match="do not end before they start"):
        Block((2, 1), (0, 3))


@pytest.fixture
def striped(monkeypatch):
    """A hop of a striped ring, with keys of a later rank, where cuDNN returns ones."""

    def forward(query, key, value, **_):
        return jnp.ones_like(query), jnp.ones((*query.shape[:1], 2, query.shape[1]))

    def backward(query, key, value, lse, *_, **__):
        assert lse.shape == (1, 2, query.shape[1])
        return jnp.ones_like(query), jnp.ones_like(key), jnp.ones_like(value)

    monkeypatch.setattr(cudnn, "forward", forward)
    monkeypatch.setattr(cudnn, "backward", backward)
    config = HopConfig(
        scale=1.0,
        mask=Mask(None, 0, 8, 8),
        query_segments=(4,),
        key_segments=(4,),
        blocks=SCHEDULES["striped"].blocks(4),
    )
    query = jnp.full((1, 4, 2, 8), 3, jnp.bfloat16)
    positions = jnp.array([0, 2, 4, 6]), jnp.array([1, 3, 5, 7])
    return Operands(query, query, query, *map(Tokens, positions)), config


# Of float32, and of what float16 cannot hold, above or below.
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e6])
def test_delta_in_columns_loses_no_bits(dtype, size):
    rng = np.random.default_rng(0)
    delta = jnp.asarray(size * rng.standard_normal((2, 16, 4)), jnp.float32)
    x = jnp.ones((2, 16, 4, 8), dtype)

    @jax.jit
    def product(x, delta):
        query, key, value, out, grad = fused._with_delta(x, x, x, x, x, delta)
        assert all(y.shape[-1] == 16 and y.dtype == dtype for y in (query, key, out))
        ours = [y[..., 8:].astype(jnp.float32) for y in (query, key, value, grad)]
        return *((a * b).sum(-1) for a, b in zip(ours[::2], ours[1::2], strict=True)), (
            jnp.abs(out).max()
        )

    scores, found, out = product(x, delta)
    # Where a GPU is asked to round and widen, XLA may leave out both.
    assert "reduce_precision" in product.lower(x, delta).as_text()
    assert not scores.any()
    assert not out
    # Two bits above float32's rounding; the smallest part is a float16 times 2 ** -20.
    np.testing.assert_allclose(found, -delta, rtol=2**-22, atol=2**-33)


def test_rows_that_see_no_key_at_all_get_no_gradient(striped, monkeypatch):
    operands, config = striped
    blocks = dataclasses.replace(config.blocks, later=config.blocks.same)
    config = dataclasses.replace(config, blocks=blocks)
    seen = []

    def backward(query, key, value, lse, *_, **__):
        seen.append(lse)
        return query, key, value

    monkeypatch.setattr(cudnn, "backward", backward)
    lse = jnp.zeros((1, 4, 2)).at[:, 2].set(-jnp.inf)
    fused.hop_backward(operands, operands[0], lse, lse, operands[0], config=config)
    # exp(score - lse) is then 0, and never infinite.
    assert seen[0][0, 0].tolist() == [0, 0, jnp.inf, 0]


def test_derivatives_of_a_hop_are_those_of_xla(striped):
    (_, _, _, queries, keys, _), config = striped
    rng = np.random.default_rng(0)

    def normal(dtype=jnp.bfloat16, shape=(1, 4, 2, 8)):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    def both(choice):
        def run(query, key, value, grad, lse, delta, out):
            block = Operands(query, key, value, queries, keys)
            forward = choice.hop_forward(block, config=config)
            others = (grad, lse, delta) + (out,) * (choice is primitive)
            return forward, choice.hop_backward(block, *others, config=config)

        return run

    rows = (1, 4, 2)
    primals = [normal() for _ in range(4)]
    primals += [normal(jnp.float32, rows), normal(jnp.float32, rows), normal()]
    tangents = [normal(x.dtype, x.shape) for x in primals]
    found, expected = (
        jax.jit(functools.partial(jax.jvp, both(choice)))(
            tuple(primals), tuple(tangents)
        )
        for choice in (primitive, xla)
    )
    assert str(jax.make_jaxpr(both(primitive))(*primals)).count("jaxcomm_hop_") == 2
    # The primitive itself, not derived, is XLA's as well: this is no CUDA program.
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert any(np.any(x) for x in jax.tree.leaves(found[1]))
