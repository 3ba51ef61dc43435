"""The kernels for CUDA, interpreted on a CPU, against XLA's tiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hops import CASES, Case, hop_of, run

from jaxcomm.attention.kernels.kernel import Saved, merge
from jaxcomm.attention.kernels.pallas.kernel import Pallas
from jaxcomm.attention.kernels.pallas.work import Sizes, Work
from jaxcomm.attention.kernels.primitive import hop_backward, hop_forward
from jaxcomm.attention.kernels.xla.kernel import XLA
from jaxcomm.attention.mask import Coordinates

SMALL = Sizes(queries=16, keys=16, warps=4, stages=2)
KERNEL = Pallas((SMALL, SMALL, SMALL), interpret=True)
# In these, all options meet; the others are combinations of the same.
FEW = (2, 3, 6, 8, 9, 10, 13)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(i), marks=() if i in FEW else pytest.mark.thorough)
        for i, case in enumerate(CASES)
    ],
)
def test_kernels_equal_tiles_forward_and_backward(case):
    out, lse, grads = run(XLA, case)
    found, found_lse, found_grads = run(KERNEL, case)
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


def test_large_heads_have_tiles_of_their_own():
    case = Case(queries=80, keys=80, head_size=320, value_size=512, right=0)
    expected, found = run(XLA, case), run(Pallas(interpret=True), case)
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.linalg.norm(x - y) <= 5e-3 * np.linalg.norm(y)


def test_tiles_that_see_nothing_are_not_read():
    case = Case(right=0, queries=64, keys=64)
    hop, grad = hop_of(case)
    poison = jnp.where(jnp.arange(64) < 32, 0, jnp.nan)[None, :, None, None]
    hop = hop.replace(
        kernels=(KERNEL,),
        key=hop.key + poison.astype("bfloat16"),
        value=hop.value + poison.astype("bfloat16"),
    ).with_pairs(queries=Coordinates(jnp.arange(64)))
    out, lse = hop_forward(hop)
    assert jnp.isfinite(out[:, :32]).all()
    assert jnp.isnan(out[:, 32:]).any()
    grads = hop_backward(hop, Saved(grad, grad, lse, jnp.zeros_like(lse)))
    assert jnp.isfinite(grads.query[:, :32]).all()


def test_visits_list_whole_tiles_first_and_count_what_is_seen():
    case = Case(left=32, right=0, queries=64, keys=64)
    hop, _ = hop_of(case)
    hop = hop.with_pairs(queries=Coordinates(jnp.arange(64)))
    by_query, by_key = Work(hop, SMALL).visits()
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
    hop, grad = hop_of(case)
    mask = dataclasses.replace(hop.pairs.mask, key_length=2000)
    hop = hop.replace(kernels=(KERNEL,)).with_pairs(mask=mask)
    keys = hop.pairs.keys
    further = keys._replace(positions=keys.positions + shift)
    second = hop.replace(key=hop.key[:, ::-1]).with_pairs(keys=further)

    @jax.jit
    def run(hop, second, grad):
        first = hop_forward(hop)
        both = hop_forward(second, first)
        saved = Saved(grad, grad, both[1], jnp.zeros_like(first[1]))
        total = jnp.ones(hop.query.shape, jnp.float32)
        grads, onto = (hop_backward(second, saved, of) for of in (None, total))
        return first, both, merge(first, hop_forward(second)), grads, onto

    first, both, apart, grads, onto = run(hop, second, grad)
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
