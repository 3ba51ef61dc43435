"""The ring with a model of cuDNN's two calls in their place, in float64.

The model has cuDNN's signature and masks and nothing else, so what is shown is all that
surrounds the kernel: which blocks are computed, the merge, the gradients from a global
log-sum-exp. tests/gpu has the kernel itself.
"""

import functools
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split
from dense import Options

from jaxcomm.attention.kernels import cudnn
from jaxcomm.attention.kernels.kernel import Hop, Saved
from jaxcomm.attention.kernels.scores import Scores
from jaxcomm.attention.mask import Coordinates, Mask
from jaxcomm.attention.pairs import Pairs
from jaxcomm.attention.strategies import loop
from jaxcomm.compat import gpus

CAUSAL = Options(is_causal=True)
RECIPE = Path(__file__).parents[3] / "examples/recipes/attention_kernel.py"
PLAIN = runpy.run_path(str(RECIPE))["Plain"]()


def _hop_of(query, key, value, *, scale, is_causal, left=None):
    lengths = query.shape[1], key.shape[1]
    if is_causal:
        assert lengths[0] == lengths[1]
    else:
        assert left is None
    tokens = (Coordinates(jnp.arange(length)) for length in lengths)
    pairs = Pairs(Mask(left, 0 if is_causal else None, *lengths), *tokens)
    return Hop(Scores(scale), pairs, query, key, value)


def model_forward(query, key, value, **options):
    out, lse = PLAIN.forward(_hop_of(query, key, value, **options))
    return out, jnp.moveaxis(lse, 1, 2)


def model_backward(query, key, value, lse, out, grad_out, **options):
    """Return the gradients of a block from the log-sum-exp and output of all blocks."""
    hop = _hop_of(query, key, value, **options)
    delta = (grad_out.astype(hop.sum_dtype) * out).sum(-1)
    saved = Saved(grad_out, out, jnp.moveaxis(lse, 1, 2), delta)
    return PLAIN.backward(hop, saved)[:3]


@pytest.fixture
def heads():
    return set()


@pytest.fixture
def calls(monkeypatch, heads):
    """Have CPU programs call the model, in any dtype, and list what it is asked."""
    asked = []
    # What is patched here is not part of what a program is traced from.
    jax.clear_caches()

    def listed(what, function):
        def call(query, key, *others, is_causal, **options):
            asked.append((what, query.shape[1], key.shape[1], is_causal))
            heads.add(query.shape[3])
            found = function(query, key, *others, is_causal=is_causal, **options)
            if what == "forward":
                return found[0].astype(query.dtype), found[1]
            return [x.astype(query.dtype) for x in found]

        return call

    monkeypatch.setattr(gpus, "cudnn_forward", listed("forward", model_forward))
    backward = listed("backward", model_backward)
    monkeypatch.setattr(gpus, "cudnn_backward", backward)
    dtypes = ("float64", "float32", "bfloat16")
    monkeypatch.setattr(gpus, "_DTYPES", dtypes)
    monkeypatch.setattr(cudnn, "_why_not_compiled", lambda *_: None)
    # As on a mesh of GPUs.
    monkeypatch.setattr(gpus, "are_of_mesh", lambda: True)
    yield asked
    jax.clear_caches()


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield functools.partial(split.inputs, dtype=jnp.float64)


@pytest.mark.parametrize(
    ("tokens", "size", "schedule", "how"),
    [
        (7, 1, "zigzag", None),
        (6, 2, "contiguous", None),
        (7, 3, "striped", None),
        (6, 4, "zigzag", None),
        (7, 4, "zigzag", None),
        (1, 4, "zigzag", None),
        (1, 4, "striped", None),
        # As a loop of the program.
        (7, 4, "zigzag", "loop"),
        (7, 4, "zigzag", "blocking"),
    ],
)
def test_causal_equals_dense_with_gradients_of_output_and_residual(
    calls, float64, monkeypatch, tokens, size, schedule, how
):
    if how == "loop":
        monkeypatch.setattr(loop, "_UNROLLED_RANKS", 1)
    elif how == "blocking":
        monkeypatch.setattr(loop, "ring_shift_start", split.Blocking)
    # Two query heads to a key head.
    *arrays, grads = float64((1, tokens * size, 4, 8), (1, tokens * size, 2, 8))
    split.compare(*arrays, CAUSAL, grads, 1e-13, size=size, schedule=schedule)
    assert {what for what, *_ in calls} == {"forward", "backward"}


@pytest.mark.parametrize(
    ("schedule", "size", "strategy", "key_heads", "left"),
    [
        ("zigzag", 4, "ring", 1, None),
        ("striped", 4, "ring", 4, None),
        ("contiguous", 4, "ring", 2, None),
        # Windows where one rank has all tokens.
        ("contiguous", 1, "ring", 1, 5),
        ("contiguous", 1, "ring", 4, 23),
        ("contiguous", 4, "ulysses", 4, 1),
        ("contiguous", 4, "ulysses", 4, 22),
    ],
)
def test_without_the_residual_delta_is_cudnns_own(
    calls, heads, float64, schedule, size, strategy, key_heads, left
):
    # Values have heads of their own size.
    *arrays, grads = float64((1, 24, 4, 8), (1, 24, key_heads, 8), value_size=16)
    options = Options(is_causal=True, window=None if left is None else (left, 0))
    how = {"size": size, "schedule": schedule, "strategy": strategy}
    how |= {"implementation": "cudnn", "return_residual": False}
    split.compare(*arrays, options, grads, 1e-13, **how)
    assert {what for what, *_ in calls} == {"forward", "backward"}
    # No head is longer for a log-sum-exp that nobody asked for.
    assert heads == {8}
    if left is not None:
        assert {tuple(rest) for _, *rest in calls} == {(24, 24, True)}


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_without_a_mask_lengths_may_differ(calls, float64, strategy):
    *arrays, grads = float64((1, 40, 4, 8), (1, 8, 4, 8))
    split.compare(*arrays, split.PLAIN, grads, 1e-13, size=4, strategy=strategy)
    # One kind of block, so no branches: a call for the loop, one for the last hop.
    tokens = (10, 2) if strategy == "ring" else (40, 8)
    assert set(calls) == {(what, *tokens, False) for what in ("forward", "backward")}


def test_a_vmapped_ring_is_computed_by_xla(calls):
    arrays = split.inputs((4, 1, 6, 2, 8))[:3]
    ours, xla = (
        jax.jit(
            jax.vmap(
                functools.partial(split.on_ranks, is_causal=True, **options),
                axis_name="context",
            )
        )
        for options in ({}, {"implementation": "xla"})
    )
    # Added up at the end, and not hop by hop.
    np.testing.assert_allclose(ours(*arrays), xla(*arrays), atol=1e-6)
    assert not calls
