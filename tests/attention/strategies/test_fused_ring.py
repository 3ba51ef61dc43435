"""The ring with a model of cuDNN's two calls in their place, in float64.

The model has cuDNN's signature and masks and nothing else, so what is shown is all that
surrounds the kernel: which blocks are computed, the merge, the gradients from a global
log-sum-exp. tests/gpu has the kernel itself.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split
from dense import Options
from split import on_ranks

import jaxcomm
from jaxcomm.attention.kernels import cudnn
from jaxcomm.attention.kernels.kernel import sum_dtype
from jaxcomm.attention.strategies import ring
from jaxcomm.compat import gpus

# In natural order: nothing to deal.
attend = functools.partial(on_ranks, is_causal=True)
CAUSAL = Options(is_causal=True)


def _weights_of(query, key, *, scale, is_causal, left, lse=None):
    key = jnp.repeat(key, query.shape[2] // key.shape[2], 2)
    scores = scale * jnp.einsum("btnd,bsnd->bnts", query, key)
    if is_causal:
        assert query.shape[1] == key.shape[1]
        seen = jnp.tri(*scores.shape[2:], dtype=bool)
        if left is not None:
            seen &= ~jnp.tri(*scores.shape[2:], k=-left - 1, dtype=bool)
        scores = jnp.where(seen, scores, -jnp.inf)
    else:
        assert left is None
    lse = jax.nn.logsumexp(scores, -1) if lse is None else lse
    return jnp.exp(scores - lse[..., None]), lse


def _weigh(weights, value):
    value = jnp.repeat(value, weights.shape[1] // value.shape[2], 2)
    return jnp.einsum("bnts,bsnd->btnd", weights, value)


def model_forward(query, key, value, *, left=None, **options):
    """Compute in float32 at least, whatever is read and written, as cuDNN does."""
    query, key, value = (x.astype(sum_dtype(x.dtype)) for x in (query, key, value))
    weights, lse = _weights_of(query, key, left=left, **options)
    return _weigh(weights, value), lse


def model_backward(query, key, value, lse, out, grad_out, *, left=None, **options):
    """Return the gradients of a block from the log-sum-exp and output of all blocks."""
    arrays = query, key, value, out, grad_out
    query, key, value, out, grad_out = (x.astype(sum_dtype(x.dtype)) for x in arrays)
    delta = (grad_out * out).sum(-1)

    def block(query, key, value):
        weights, _ = _weights_of(query, key, left=left, lse=lse, **options)
        # The residual of all blocks moves too, by what ``delta`` says.
        less = jnp.einsum("bnts,btn->", weights, delta)
        return (_weigh(weights, value) * grad_out).sum() - less

    return jax.grad(block, (0, 1, 2))(query, key, value)


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
    ("tokens", "size", "schedule", "strategy"),
    [
        (7, 1, "zigzag", "ring"),
        (6, 2, "contiguous", "ring"),
        (7, 3, "striped", "ring"),
        (6, 4, "zigzag", "ring"),
        (7, 4, "zigzag", "ring"),
        (1, 4, "zigzag", "ring"),
        (1, 4, "striped", "ring"),
        # As a loop of the program.
        (7, 4, "zigzag", "loop"),
        (7, 4, "zigzag", "blocking"),
    ],
)
def test_causal_equals_dense_with_gradients_of_output_and_residual(
    calls, float64, monkeypatch, tokens, size, schedule, strategy
):
    if strategy == "loop":
        strategy = "ring"
        monkeypatch.setattr(ring, "_UNROLLED_RANKS", 1)
    elif strategy == "blocking":
        strategy = "ring"
        monkeypatch.setattr(ring, "ring_shift_start", split.Blocking)
    # Two query heads to a key head.
    *arrays, grads = float64((1, tokens * size, 4, 8), (1, tokens * size, 2, 8))
    how = {"size": size, "schedule": schedule, "strategy": strategy}
    split.compare(*arrays, CAUSAL, grads, 1e-13, **how)
    assert {what for what, *_ in calls} == {"forward", "backward"}


@pytest.mark.parametrize(
    ("schedule", "size", "strategy", "key_heads", "left"),
    [
        ("zigzag", 4, "ring", 1, None),
        ("striped", 4, "ring", 4, None),
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
    *arrays, (grad, _) = float64((1, 24, 4, 8), (1, 24, key_heads, 8))
    layout = jaxcomm.Layout(schedule, size, 24)
    (dealt, dealt_grad), tokens = layout.reorder((arrays, grad))
    window = None if left is None else (left, 0)
    local = functools.partial(
        attend, schedule=schedule, strategy=strategy, implementation="cudnn",
        local_window_size=window,
    )  # fmt: skip
    found = split.results(split.sharded(local, size), dealt, dealt_grad)
    found = [tokens.restore(np.asarray(x)) for x in found]
    options = Options(is_causal=True, window=window)
    split.assert_results(found, arrays, grad, options, 1e-13)
    assert {what for what, *_ in calls} == {"forward", "backward"}
    # No head is longer for a log-sum-exp that nobody asked for.
    assert heads == {8}
    if window:
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
        jax.jit(jax.vmap(functools.partial(attend, **options), axis_name="context"))
        for options in ({}, {"implementation": "xla"})
    )
    np.testing.assert_array_equal(ours(*arrays), xla(*arrays))
    assert not calls
