"""cuDNN's attention on NVIDIA GPUs: hops of a ring, rings, and windows.

A ring of four needs four devices, so its hops are compared one by one, with XLA's
tiles in float32: of a rank with the keys of an earlier one, its own, and a later one's.
"""

import dataclasses

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split
from dense import Options, assert_within_limits
from hops import Case, both, hop_of

from jaxcomm.attention.kernels.cudnn import fused_attention_reason
from jaxcomm.attention.kernels.selection import kernels_for
from jaxcomm.attention.layout import Layout
from jaxcomm.attention.mask import Coordinates, Mask
from jaxcomm.attention.pairs import Pairs
from jaxcomm.attention.strategies.hops import blocks_of

pytestmark = pytest.mark.gpu

CAUSAL = Options(is_causal=True)


@dataclasses.dataclass(frozen=True)
class RingCase:
    """A ring of four: causal, if its ranks hold as many keys as queries."""

    schedule: str = "zigzag"
    tokens: int = 192
    keys: int | None = None
    heads: int = 4
    key_heads: int = 4
    head_size: int = 64
    value_size: int | None = None
    dtype: str = "bfloat16"
    residual: bool = False


HOPS = (
    *(
        RingCase(heads=8, key_heads=key_heads, head_size=head_size, residual=residual)
        for key_heads in (8, 2)
        for head_size in (64, 128)
        for residual in (False, True)
    ),
    RingCase(tokens=129, residual=True),
    RingCase(head_size=256, tokens=128),
    RingCase(head_size=72, dtype="float16", residual=True),
    RingCase("contiguous", key_heads=1),
    RingCase("striped", tokens=129, key_heads=2),
    RingCase("striped", head_size=128, residual=True),
    RingCase(keys=64, key_heads=2, residual=True),
    # Multi-head latent attention.
    RingCase(head_size=192, value_size=128),
    RingCase("striped", tokens=129, key_heads=2, head_size=192, value_size=128),
)
SOURCES = {"same": 1, "later": 2, "earlier": 0}


def hop_of_ring(case, source):
    """Return the hop of rank 1 with the keys of another, and a gradient."""
    keys = case.keys or case.tokens
    hop, grad = hop_of(
        Case(
            queries=case.tokens, keys=keys, heads=case.heads, key_heads=case.key_heads,
            head_size=case.head_size, value_size=case.value_size or case.head_size,
            dtype=case.dtype,
        )
    )  # fmt: skip
    layouts = [Layout(case.schedule, 4, 4 * held) for held in (case.tokens, keys)]
    mask = Mask(None, None if case.keys else 0, 4 * case.tokens, 4 * keys)
    (own,), others = blocks_of(*layouts, mask, keys)
    distinct = tuple(dict.fromkeys((own, *others)))
    of_source = {"same": own, "earlier": others[0], "later": others[-1]}
    at = distinct.index(of_source[source])
    queries, of_keys = (
        Coordinates(jnp.asarray(layout.positions_of(rank)))
        for layout, rank in zip(layouts, (1, SOURCES[source]), strict=True)
    )
    parts = [layout.schedule.segments(layout.local_length) for layout in layouts]
    pairs = Pairs(
        mask, queries, of_keys, tuple(parts), blocks=distinct, block=jnp.int32(at)
    )
    return hop.replace(pairs=pairs, has_residual=case.residual), grad


def check_hop(case, source, implementation):
    # Many small steps, in whole float32: a CPU is faster.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        hop, grad = hop_of_ring(case, source)
        wide = {x: getattr(hop, x).astype("float32") for x in ("query", "key", "value")}
        hop = hop.replace(kernels=kernels_for("xla"), **wide)
        expected = both(hop, grad.astype("float32"))
    hop, grad = hop_of_ring(case, source)
    found = both(hop.replace(kernels=kernels_for(implementation)), grad)
    assert_within_limits(
        *(dense.Attention(out, lse, *of[:3]) for out, lse, of in (found, expected))
    )


def check_ring(options, shapes, residual=False, **how):
    *arrays, (grad_out, grad_lse) = split.inputs(*shapes, dtype=jnp.bfloat16)
    grads = grad_out, grad_lse * float(residual)
    found = split.attend(
        *arrays, options, grads, return_residual=residual, backend="xla", **how
    )
    assert_within_limits(found, dense.attention(*arrays, options, grads))


@pytest.fixture
def cudnn(gpus):
    if reason := fused_attention_reason() if gpus else "no NVIDIA GPU":
        pytest.skip(reason)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("case", HOPS, ids=str)
def test_hops_of_a_ring_equal_tiles_in_float32(case, source, cudnn):
    reason = fused_attention_reason(case.head_size, case.value_size)
    if reason is not None:
        pytest.skip(reason)
    check_hop(case, source, "cudnn")


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("options", [CAUSAL, Options()], ids=["causal", "whole"])
def test_rings_of_one_and_of_all_devices_equal_float64(options, residual, gpus, cudnn):
    for size in sorted({1, min(4, len(gpus))}):
        shapes = (1, 192 * size, 4, 128), (1, 192 * size, 2, 128)
        check_ring(options, shapes, residual, size=size, implementation="cudnn")


@pytest.mark.parametrize(
    ("key_heads", "head_size", "left"), [(2, 128, 1023), (4, 64, 1500), (2, 128, 2499)]
)
def test_windows_equal_float64(key_heads, head_size, left, cudnn):
    options = Options(is_causal=True, window=(left, 0))
    shapes = (1, 2500, 4, head_size), (1, 2500, key_heads, head_size)
    how = {"schedule": "contiguous", "implementation": "cudnn"}
    check_ring(options, shapes, size=1, **how)


# Which says once that it does so.
@pytest.mark.filterwarnings("ignore:.*XLA computes this tile by tile")
def test_inputs_that_cudnn_does_not_take_are_computed_without_it(cudnn):
    *arrays, grads = split.inputs((1, 192, 4, 64))
    found = split.attend(*arrays, CAUSAL, grads, size=1)
    assert all(np.isfinite(x).all() for x in found[:5])


@pytest.mark.parametrize("source", SOURCES)
def test_xla_computes_the_same_hops_in_tiny_sizes(source):
    check_hop(RingCase(tokens=12, head_size=8, residual=True), source, "xla")
