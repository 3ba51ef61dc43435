"""jaxcomm's attention kernels on an NVIDIA GPU, against XLA's tiles in float32."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hops import CASES, Case, run

from jaxcomm.attention.kernels.pallas.kernel import PALLAS
from jaxcomm.attention.kernels.xla.kernel import XLA
from jaxcomm.compat import gpus

pytestmark = pytest.mark.gpu

# Root mean square, relative: weights are rounded to the inputs' dtype.
LIMIT = 4e-3


# Two and a half tiles.
LARGE = [
    dataclasses.replace(
        case,
        queries=6 * case.queries + 5,
        keys=6 * case.keys + 7,
        left=case.left and 6 * case.left,
        head_size=case.head_size * scale,
        value_size=case.value_size * scale,
        bias=case.bias
        and (
            *case.bias[:2],
            case.bias[2] // case.queries * (6 * case.queries + 5) or 1,
        ),
    )
    for case in CASES
    for scale in (1, 4, 8)
    if max(case.head_size, case.value_size) * scale <= 256
]


@pytest.fixture(autouse=True)
def gpu():
    reason = gpus.why_none_serves(gpus.local())
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize(
    "case",
    [
        *LARGE,
        Case(head_size=192, value_size=128, right=0),
        Case(head_size=512, value_size=512, right=0),
        Case(head_size=512, value_size=512, bias=(1, 2, 48)),
    ],
    ids=str,
)
def test_kernels_equal_tiles_in_float32(case):
    # Many small steps: a CPU is faster.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        expected = run(XLA, case, "float32")
    found = run(PALLAS, case)
    is_empty = jnp.isneginf(expected[1])
    assert (jnp.isneginf(found[1]) == is_empty).all()
    pairs = zip(*map(jax.tree.leaves, (found, expected)), strict=True)
    for x, y in pairs:
        x, y = (jnp.where(jnp.isneginf(z), 0, z) for z in (x, y))
        assert jnp.linalg.norm(x - y) <= LIMIT * jnp.linalg.norm(y)
