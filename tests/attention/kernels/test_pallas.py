"""The kernels for CUDA, interpreted on a CPU, against XLA's tiles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hops import CASES, Case, arrays_of, run

from jaxcomm.attention.kernels import pallas, xla
from jaxcomm.attention.kernels.pallas_work import Sizes, Work
from jaxcomm.attention.mask import Tokens

SMALL = Sizes(queries=16, keys=16, warps=4, stages=2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_equal_tiles_forward_and_backward(case):
    out, lse, grads = run(xla.hop_forward, xla.hop_backward, case)
    kernels = (
        functools.partial(pallas.hop_forward, sizes=SMALL, interpret=True),
        functools.partial(pallas.hop_backward, sizes=(SMALL, SMALL), interpret=True),
    )
    found, found_lse, found_grads = run(*kernels, case)
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
    options = {"config": config, "interpret": True}
    out, lse = pallas.hop_forward(operands, sizes=SMALL, **options)
    assert jnp.isfinite(out[:, :32]).all()
    assert jnp.isnan(out[:, 32:]).any()
    delta = jnp.zeros_like(lse)
    sizes = (SMALL, SMALL)
    grads = pallas.hop_backward(operands, grad, lse, delta, sizes=sizes, **options)
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
