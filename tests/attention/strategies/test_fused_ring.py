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
from split import on_ranks

import jaxcomm
from jaxcomm.attention.kernels import cudnn, cudnn_support, gpus
from jaxcomm.attention.kernels.operands import sum_dtype
from jaxcomm.attention.schedules.zigzag import Zigzag
from jaxcomm.attention.strategies.ring import Ring

# In natural order: nothing to deal.
attend = functools.partial(on_ranks, is_causal=True)


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


def _narrow(function):
    def call(query, *others, **options):
        found = function(query, *others, **options)
        if function is model_forward:
            return found[0].astype(query.dtype), found[1]
        return [x.astype(query.dtype) for x in found]

    return call


@pytest.fixture
def calls(monkeypatch):
    """Have CPU programs call the model, in any dtype, and list what it is asked."""
    asked = []
    # What is patched here is not part of what a program is traced from.
    jax.clear_caches()

    def listed(function, what):
        def call(query, key, *others, is_causal, **options):
            asked.append((what, query.shape[1], key.shape[1], is_causal))
            options["is_causal"] = is_causal
            return _narrow(function)(query, key, *others, **options)

        return call

    for what, function in {
        "forward": model_forward,
        "backward": model_backward,
    }.items():
        monkeypatch.setattr(cudnn, what, listed(function, what))
    dtypes = ("float64", "float32", "bfloat16")
    monkeypatch.setattr(cudnn_support, "_DTYPES", dtypes)
    monkeypatch.setattr(cudnn_support, "why_not_compiled", lambda *_: None)
    # As on a mesh of GPUs.
    monkeypatch.setattr(gpus, "are_of_mesh", lambda: True)
    yield asked
    jax.clear_caches()


@pytest.fixture
def inputs64(inputs):
    """Inputs in float64, which lasts as long as the test."""
    with jax.enable_x64(True):

        def make(*shapes):
            *arrays, (grad_out, grad_lse) = inputs(*shapes, dtype=jnp.float64)
            return *arrays, (grad_out, grad_lse.astype(jnp.float64))

        yield make


def _results(function, arrays, grad):
    @jax.jit
    def run(arrays, grad):
        out, transpose = jax.vjp(function, *arrays)
        return out, *transpose(grad)

    return run(arrays, grad)


@pytest.fixture
def assert_results(dense, assert_close):
    """Compare an output and its gradients with dense attention; no residual."""

    def check(found, arrays, grad, tolerance=1e-13, **options):
        out, *gradients = found
        no_lse = jnp.zeros(grad.shape[:3], grad.dtype)
        expected = dense(*arrays, is_causal=True, grads=(grad, no_lse), **options)
        assert_close((out, None, *gradients), expected._replace(lse=None), tolerance)

    return check


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
        (7, 4, "zigzag", Ring(unrolled_ranks=1)),
    ],
)
def test_causal_equals_dense_with_gradients_of_output_and_residual(
    calls, ring, dense, inputs64, assert_close, schedule, size, tokens, strategy
):
    # Two query heads to a key head.
    length = tokens * size
    query, key, value, grads = inputs64((1, length, 4, 8), (1, length, 2, 8))
    options = {"is_causal": True, "grads": grads}
    found = ring(
        query, key, value, size=size, schedule=schedule, strategy=strategy, **options
    )
    assert {what for what, *_ in calls} == {"forward", "backward"}
    assert_close(found, dense(query, key, value, **options), 1e-13)


@pytest.mark.parametrize(
    ("size", "strategy", "left"),
    [(1, "ring", 5), (1, "ring", 23), (4, "ulysses", 1), (4, "ulysses", 22)],
)
def test_windows_where_one_rank_has_all_tokens(
    calls, sharded, assert_results, inputs64, left, size, strategy
):
    *arrays, (grad, _) = inputs64((1, 24, 4, 8))
    options = {"implementation": "cudnn", "local_window_size": (left, 0)}
    local = functools.partial(attend, strategy=strategy, **options)
    found = _results(sharded(local, size), arrays, grad)
    assert {tuple(rest) for _, *rest in calls} == {(24, 24, True)}
    assert_results(found, arrays, grad, window=(left, 0))


def test_natural_order_on_one_device_is_cudnns_alone(
    calls, mesh_of, assert_results, inputs64, monkeypatch
):
    """No token moves, and no head is longer for a log-sum-exp that nobody asked for."""
    *arrays, (grad, _) = inputs64((2, 24, 4, 8), (2, 24, 2, 8))
    heads = set()

    def backward(query, *others, **options):
        heads.add(query.shape[3])
        return model_backward(query, *others, **options)

    monkeypatch.setattr(cudnn, "backward", backward)
    attend = functools.partial(
        jaxcomm.dot_product_attention, mesh=mesh_of(1), axis_name="context",
        is_causal=True,
    )  # fmt: skip
    program = str(jax.make_jaxpr(lambda x, y: _results(attend, x, y))(arrays, grad))
    assert "sort" not in program
    assert "gather" not in program
    found = _results(attend, arrays, grad)
    assert calls
    assert heads == {8}
    assert_results(found, arrays, grad)


@pytest.mark.parametrize(
    ("schedule", "size", "group"),
    [("zigzag", 4, 4), ("striped", 4, 1), ("contiguous", 1, 4)],
)
def test_without_the_residual_delta_is_cudnns_own(
    calls, sharded, assert_results, inputs64, schedule, group, size
):
    *arrays, (grad, _) = inputs64((1, 24, 4, 8), (1, 24, 4 // group, 8))
    layout = jaxcomm.Layout(schedule, size, 24)
    (dealt, dealt_grad), positions = layout.reorder((arrays, grad))
    local = functools.partial(attend, schedule=schedule)
    found = _results(sharded(local, size), dealt, dealt_grad)
    assert calls
    found = [layout.restore(np.asarray(x), positions) for x in found]
    assert_results(found, arrays, grad)


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_without_a_mask_lengths_may_differ(
    calls, ring, dense, inputs64, assert_close, strategy
):
    query, key, value, grads = inputs64((1, 40, 4, 8), (1, 8, 4, 8))
    found = ring(query, key, value, size=4, grads=grads, strategy=strategy)
    assert_close(found, dense(query, key, value, grads=grads), 1e-13)
    # One kind of block, so no branches: a call for the loop, one for the last hop.
    tokens = (10, 2) if strategy == "ring" else (40, 8)
    assert set(calls) == {(what, *tokens, False) for what in ("forward", "backward")}


@pytest.mark.parametrize(
    ("size", "schedule", "tokens", "blocks", "tiles"),
    [
        (1, "zigzag", 6, {(6, 6, True)}, None),
        (4, "contiguous", 6, {(6, 6, True), (6, 6, False)}, None),
        (4, "striped", 6, {(6, 6, True), (5, 5, True)}, None),
        # Forward two tiles, whichever block it is.
        (
            4,
            "zigzag",
            6,
            {(6, 6, True), (6, 3, False), (3, 6, False)},
            {(6, 6, True), (3, 3, False)},
        ),
        (4, "zigzag", 5, {(5, 5, True), (5, 3, False), (2, 5, False)}, None),
    ],
)
def test_each_hop_computes_no_more_than_its_block(
    calls, sharded, inputs, size, schedule, tokens, blocks, tiles
):
    *arrays, (grad, _) = inputs((1, size * tokens, 2, 8))
    whole = sharded(functools.partial(attend, schedule=schedule), size)
    jax.jit(functools.partial(_results, whole)).lower(arrays, grad)
    for asked, expected in {"forward": tiles or blocks, "backward": blocks}.items():
        assert {tuple(rest) for what, *rest in calls if what == asked} == expected


class Nameless(Zigzag):
    def blocks(self, length):
        return None


@pytest.mark.parametrize(
    ("size", "length", "options"),
    [
        # Windows, of which the last is one with a residual.
        (4, 24, {"window": (5, 0)}),
        (1, 24, {"window": (5, 2)}),
        (1, 24, {"window": (5, 0)}),
        # Padding.
        (4, 23, {"is_causal": True}),
        (4, 24, {"is_causal": True, "schedule": Nameless()}),
    ],
)
def test_what_cudnn_does_not_compute_is_left_to_xla(
    calls, ring, dense, inputs, assert_close, size, length, options
):
    query, key, value, _ = inputs((1, length, 2, 8))
    found = ring(query, key, value, size=size, **options)
    assert not calls
    options = {name: x for name, x in options.items() if name != "schedule"}
    assert_close(found, dense(query, key, value, **options), 1e-5)


def test_the_error_in_bfloat16_does_not_grow_with_the_ring(calls, ring, dense, inputs):
    query, key, value, grads = inputs((1, 256, 2, 16), dtype=jnp.bfloat16)
    expected = dense(query, key, value, is_causal=True, grads=grads)

    def errors(size):
        found = ring(query, key, value, size=size, is_causal=True, grads=grads)
        # Not of the residual, which is float32.
        pairs = [(found[i], expected[i]) for i in (0, 2, 3, 4)]
        return [np.mean((np.asarray(a, np.float64) - b) ** 2) ** 0.5 for a, b in pairs]

    assert max(np.divide(errors(8), errors(2))) <= 1.2


def _vmap_last(*arrays):
    mapped = jax.vmap(attend, in_axes=4, out_axes=4)
    return mapped(*(x[..., None] for x in arrays))[..., 0]


def _scan(*arrays):
    once = jax.checkpoint(lambda carry, _: (carry, attend(*arrays)))
    return jax.lax.scan(once, 0, None, 1)[1][0]


@pytest.mark.parametrize("transformed", [_vmap_last, _scan])
def test_transforms_change_nothing(calls, sharded, inputs, assert_results, transformed):
    *arrays, (grad, _) = inputs((2, 16, 4, 8), (2, 16, 2, 8))
    found = _results(sharded(transformed, check_vma=False), arrays, grad)
    assert calls
    assert_results(found, arrays, grad, 1e-5)


def test_a_vmapped_ring_is_computed_by_xla(calls, inputs):
    query, key, value, _ = inputs((4, 1, 6, 2, 8))
    found = [
        jax.jit(
            jax.vmap(
                functools.partial(attend, implementation=implementation),
                axis_name="context",
            )
        )(query, key, value)
        for implementation in (None, "xla")
    ]
    assert not calls
    np.testing.assert_array_equal(*found)
