"""The kernels for CUDA, interpreted on a CPU, against XLA's tiles."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hops import CASES, Case, arrays_of, run

from jaxcomm.attention.kernels import pallas, xla
from jaxcomm.attention.kernels.pallas_work import Sizes, Work
from jaxcomm.attention.mask import Tokens
from jaxcomm.attention.merge import merge

SMALL = Sizes(queries=16, keys=16, warps=4, stages=2)
SIZES = SMALL, SMALL
FORWARD = functools.partial(pallas.hop_forward, sizes=SMALL, interpret=True)
BACKWARD = functools.partial(pallas.hop_backward, sizes=SIZES, interpret=True)
# In these, all options meet; the others are combinations of the same.
FEW = (2, 3, 6, 8, 9)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(i), marks=() if i in FEW else pytest.mark.thorough)
        for i, case in enumerate(CASES)
    ],
)
def test_kernels_equal_tiles_forward_and_backward(case):
    out, lse, grads = run(xla.hop_forward, xla.hop_backward, case)
    found, found_lse, found_grads = run(FORWARD, BACKWARD, case)
    assert {x.dtype.name for x in jax.tree.leaves(found_grads)} == {"float32"}
    np.testing.assert_allclose(found_lse, lse, atol=1e-5)
    empty = np.isneginf(lse)
    assert (found[empty] == 0).all()
    assert (found_grads.query[empty] == 0).all()
    for x, y in zip((found, *found_grads), (out, *grads), strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            # Weights are rounded to the inputs' dtype before the second product.
            assert np.linalg.norm(x - y) <= 5e-3 * np.linalg.norm(y)


def test_tiles_that_see_nothing_are_not_read():
    case = Case(right=0, queries=64, keys=64)
    operands, config, grad = arrays_of(case)
    poison = jnp.where(jnp.arange(64) < 32, 0, jnp.nan)[None, :, None, None]
    operands = operands._replace(
        key=operands.key + poison.astype("bfloat16"),
        value=operands.value + poison.astype("bfloat16"),
        queries=Tokens(jnp.arange(64, dtype=jnp.int32)),
    )
    out, lse = FORWARD(operands, config=config)
    assert jnp.isfinite(out[:, :32]).all()
    assert jnp.isnan(out[:, 32:]).any()
    grads = BACKWARD(operands, grad, lse, jnp.zeros_like(lse), config=config)
    assert jnp.isfinite(grads.query[:, :32]).all()


def test_visits_list_whole_tiles_first_and_count_what_is_seen():
    case = Case(left=32, right=0, queries=64, keys=64)
    operands, config, _ = arrays_of(case)
    operands = operands._replace(queries=Tokens(jnp.arange(64, dtype=jnp.int32)))
    by_query, by_key = Work(operands, config, SMALL).visits()
    # Of a band of 33: the diagonal and the far edge need the mask.
    assert by_query.counts[0].tolist() == [[0, 1], [1, 2], [1, 3], [1, 3]]
    assert by_query.order[0, 3, :3].tolist() == [2, 1, 3]
    assert by_key.counts[0].tolist() == [[1, 3], [1, 3], [1, 2], [0, 1]]
    assert by_key.order[0, 0, :3].tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    "shift", [pytest.param(0, marks=pytest.mark.thorough), 10, 1000]
)
def test_kernels_go_on_from_what_other_keys_gave(shift):
    """Keys that are ``shift`` positions further on, after keys at the beginning."""
    case = Case(batch=2, queries=50, keys=40, heads=4, right=0, has_slopes=shift == 0)
    operands, config, grad = arrays_of(case)
    further = operands.keys._replace(positions=operands.keys.positions + shift)
    second = operands._replace(key=operands.key[:, ::-1], keys=further)
    mask = dataclasses.replace(config.mask, key_length=2000)
    config = dataclasses.replace(config, mask=mask)
    forward, backward = (
        functools.partial(f, config=config) for f in (FORWARD, BACKWARD)
    )

    @jax.jit
    def run(operands, second, grad):
        first = forward(operands)
        both = forward(second, first)
        saved = grad, both[1], jnp.zeros_like(first[1])
        total = jnp.ones(operands.query.shape, jnp.float32)
        grads, onto = (backward(second, *saved, None, of) for of in (None, total))
        return first, both, merge(*first, *forward(second)), grads, onto

    first, both, apart, grads, onto = run(operands, second, grad)
    for found, expected in zip(both, apart, strict=True):
        # Weights are rounded relative to another maximum.
        found, expected = (jnp.where(jnp.isneginf(x), 0, x) for x in (found, expected))
        assert jnp.linalg.norm(found - expected) <= 3e-3 * jnp.linalg.norm(expected)
    if shift == 1000:
        assert all((x == y).all() for x, y in zip(both, first, strict=True))
        assert (onto.query == 1).all()
    np.testing.assert_allclose(onto.query, grads.query + 1, rtol=1e-6)
    for found, expected in zip(onto[1:], grads[1:], strict=True):
        assert (found is None) == (expected is None)
        assert found is None or (found == expected).all()
