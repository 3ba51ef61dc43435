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
from jaxcomm.attention.schedules.registry import SCHEDULES
from jaxcomm.attention.schedules.zigzag import Zigzag
from jaxcomm.attention.strategies.ring import Ring

SPLIT = jax.P(None, "context")
every_schedule = pytest.mark.parametrize("schedule", sorted(SCHEDULES))
# In natural order: nothing to deal.
attend = functools.partial(on_ranks, is_causal=True)


def _wide(*arrays):
    """Compute as cuDNN does: in float32 at least, whatever is read and written."""
    return [x.astype(sum_dtype(x.dtype)) for x in arrays]


def _weights_of(query, key, scale, is_causal, left, lse=None):
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
    if lse is None:
        lse = jax.nn.logsumexp(scores, -1)
    return jnp.exp(scores - lse[..., None]), lse


def model_forward(query, key, value, *, scale, is_causal, left=None):
    dtype = query.dtype
    query, key, value = _wide(query, key, value)
    weights, lse = _weights_of(query, key, scale, is_causal, left)
    value = jnp.repeat(value, query.shape[2] // value.shape[2], 2)
    return jnp.einsum("bnts,bsnd->btnd", weights, value).astype(dtype), lse


def model_backward(
    query, key, value, lse, out, grad_out, *, scale, is_causal, left=None
):
    dtype = query.dtype
    query, key, value, out, grad_out = _wide(query, key, value, out, grad_out)
    weights, _ = _weights_of(query, key, scale, is_causal, left, lse)
    group = query.shape[2] // key.shape[2]
    keys, values = (jnp.repeat(x, group, 2) for x in (key, value))
    delta = jnp.moveaxis((grad_out * out).sum(-1), 2, 1)[..., None]
    grad_scores = jnp.einsum("btnd,bsnd->bnts", grad_out, values) - delta
    grad_scores *= scale * weights
    grad_query = jnp.einsum("bnts,bsnd->btnd", grad_scores, keys)
    grad_key = jnp.einsum("bnts,btnd->bsnd", grad_scores, query)
    grad_value = jnp.einsum("bnts,btnd->bsnd", weights, grad_out)

    def of_group(x):
        return x.reshape(*key.shape[:3], group, x.shape[3]).sum(3)

    grads = grad_query, of_group(grad_key), of_group(grad_value)
    return [grad.astype(dtype) for grad in grads]


@pytest.fixture
def calls(monkeypatch):
    """Have CPU programs call the model, in any dtype, and list what it is asked."""
    asked = []
    # What is patched here is not part of what a program is traced from.
    jax.clear_caches()

    def listed(function, what):
        def call(query, key, *others, is_causal, **options):
            asked.append((what, query.shape[1], key.shape[1], is_causal))
            return function(query, key, *others, is_causal=is_causal, **options)

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


@every_schedule
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [6, 7])
def test_causal_equals_dense_with_gradients_of_output_and_residual(
    calls, ring, dense, inputs64, assert_close, schedule, size, tokens
):
    # Two query heads to a key head.
    length = tokens * size
    query, key, value, grads = inputs64((2, length, 4, 16), (2, length, 2, 16))
    options = {"is_causal": True, "grads": grads}
    found = ring(query, key, value, size=size, schedule=schedule, **options)
    assert {what for what, *_ in calls} == {"forward", "backward"}
    assert_close(found, dense(query, key, value, **options), 1e-13)


@pytest.mark.parametrize("tokens", [6, 7])
def test_a_ring_that_is_a_loop_equals_dense_too(
    calls, ring, dense, inputs64, assert_close, tokens
):
    query, key, value, grads = inputs64((1, 4 * tokens, 2, 8))
    options = {"is_causal": True, "grads": grads}
    loop = Ring(unrolled_ranks=1)
    found = ring(query, key, value, size=4, strategy=loop, **options)
    assert calls
    assert_close(found, dense(query, key, value, **options), 1e-13)


@pytest.mark.parametrize("left", [1, 5, 22, 23, 40])
@pytest.mark.parametrize(("size", "strategy"), [(1, "ring"), (4, "ulysses")])
def test_windows_where_one_rank_has_all_tokens(
    calls, mesh_of, dense, inputs64, assert_close, left, size, strategy
):
    *arrays, (grad, grad_lse) = inputs64((2, 24, 4, 8), (2, 24, 4, 8))
    options = {"implementation": "cudnn", "local_window_size": (left, 0)}
    local = functools.partial(attend, strategy=strategy, **options)
    out, *gradients = _results(_whole(mesh_of(size), local), arrays, grad)
    assert {tuple(rest) for _, *rest in calls} == {(24, 24, True)}
    options = {"window": (left, 0), "grads": (grad, jnp.zeros_like(grad_lse))}
    expected = dense(*arrays, is_causal=True, **options)
    assert_close((out, None, *gradients), expected._replace(lse=None), 1e-13)


@pytest.mark.parametrize(("size", "window"), [(4, (5, 0)), (1, (5, 2)), (1, (5, 0))])
def test_other_windows_are_not_cudnns(
    calls, ring, dense, inputs, assert_close, size, window
):
    # With return_residual=True.
    query, key, value, _ = inputs((1, 24, 2, 8))
    found = ring(query, key, value, size=size, window=window)
    assert not calls
    assert_close(found, dense(query, key, value, window=window), 1e-5)


def test_natural_order_on_one_device_is_cudnns_alone(
    calls, mesh_of, dense, inputs64, assert_close, monkeypatch
):
    """No token moves, and no head is longer for a log-sum-exp that nobody asked for."""
    *arrays, (grad, grad_lse) = inputs64((2, 24, 4, 8), (2, 24, 2, 8))
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
    out, *gradients = _results(attend, arrays, grad)
    assert calls
    assert heads == {8}
    expected = dense(*arrays, is_causal=True, grads=(grad, jnp.zeros_like(grad_lse)))
    assert_close((out, None, *gradients), expected._replace(lse=None), 1e-13)


def _results(function, arrays, grad):
    @jax.jit
    def run(arrays, grad):
        out, transpose = jax.vjp(function, *arrays)
        return out, *transpose(grad)

    return run(arrays, grad)


@every_schedule
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("size", [1, 4])
def test_without_the_residual_delta_is_cudnns_own(
    calls, mesh_of, dense, inputs64, assert_close, schedule, group, size
):
    shapes = (1, 24, 4, 8), (1, 24, 4 // group, 8)
    query, key, value, (grad, grad_lse) = inputs64(*shapes)
    dealt = Deal(schedule, size, 24)
    local = functools.partial(attend, schedule=schedule)
    whole = jax.shard_map(local, mesh=mesh_of(size), in_specs=SPLIT, out_specs=SPLIT)

    found = _results(whole, [dealt(x) for x in (query, key, value)], dealt(grad))
    out, *gradients = (dealt.undo(x) for x in found)
    no_lse = (grad, jnp.zeros_like(grad_lse))
    expected = dense(query, key, value, is_causal=True, grads=no_lse)
    assert_close((out, None, *gradients), expected._replace(lse=None), 1e-13)
    assert calls


class Deal:
    """Reorder whole sequences, and undo it."""

    def __init__(self, schedule, size, length):
        self.order = SCHEDULES[schedule].shard(size, length // size)
        self.back = np.argsort(self.order)

    def __call__(self, x):
        return x[:, self.order]

    def undo(self, x):
        return np.asarray(x)[:, self.back]


@pytest.mark.parametrize("lengths", [(24, 24), (16, 64), (40, 8)])
def test_without_a_mask_lengths_may_differ(
    calls, ring, dense, inputs64, assert_close, lengths
):
    queries, keys = lengths
    query, key, value, grads = inputs64((1, queries, 4, 8), (1, keys, 2, 8))
    found = ring(query, key, value, size=4, grads=grads)
    assert_close(found, dense(query, key, value, grads=grads), 1e-13)
    # One kind of block, so no branches: a call for the loop, one for the last hop.
    assert set(calls) == {
        (what, queries // 4, keys // 4, False) for what in ("forward", "backward")
    }


@pytest.mark.parametrize(
    ("schedule", "tokens", "blocks", "tiles"),
    [
        ("contiguous", 6, {(6, 6, True), (6, 6, False)}, None),
        ("striped", 6, {(6, 6, True), (5, 5, True)}, None),
        # Forward two tiles, whichever block it is.
        (
            "zigzag",
            6,
            {(6, 6, True), (6, 3, False), (3, 6, False)},
            {(6, 6, True), (3, 3, False)},
        ),
        ("zigzag", 5, {(5, 5, True), (5, 3, False), (2, 5, False)}, None),
    ],
)
def test_each_hop_computes_no_more_than_its_block(
    calls, ring, inputs, schedule, tokens, blocks, tiles
):
    query, key, value, grads = inputs((1, 4 * tokens, 2, 8))
    ring(query, key, value, size=4, schedule=schedule, is_causal=True, grads=grads)
    for asked, expected in {"forward": tiles or blocks, "backward": blocks}.items():
        assert {tuple(rest) for what, *rest in calls if what == asked} == expected


def test_a_ring_of_one_has_no_branches(calls, ring, inputs):
    query, key, value, _ = inputs((1, 6, 2, 8))
    ring(query, key, value, size=1, is_causal=True)
    assert calls == [("forward", 6, 6, True)]


@every_schedule
def test_one_token_a_rank(calls, ring, dense, inputs64, assert_close, schedule):
    query, key, value, grads = inputs64((1, 4, 2, 8))
    options = {"is_causal": True, "grads": grads}
    found = ring(query, key, value, size=4, schedule=schedule, **options)
    assert_close(found, dense(query, key, value, **options), 1e-13)
    assert calls


def test_a_schedule_without_blocks_is_computed_from_its_positions(
    calls, ring, dense, inputs, assert_close
):
    class Nameless(Zigzag):
        def blocks(self, length):
            return None

    query, key, value, _ = inputs((1, 24, 2, 8))
    found = ring(query, key, value, size=4, schedule=Nameless(), is_causal=True)
    assert not calls
    assert_close(found, dense(query, key, value, is_causal=True), 1e-5)


def test_padding_is_left_to_xla(calls, ring, dense, inputs, assert_close):
    query, key, value, _ = inputs((1, 23, 2, 8))
    found = ring(query, key, value, size=4, is_causal=True)
    assert not calls
    assert_close(found, dense(query, key, value, is_causal=True), 1e-5)


def test_the_error_in_bfloat16_does_not_grow_with_the_ring(calls, ring, dense, inputs):
    query, key, value, grads = inputs((1, 512, 2, 32), dtype=jnp.bfloat16)
    expected = dense(query, key, value, is_causal=True, grads=grads)

    def errors(size):
        found = ring(query, key, value, size=size, is_causal=True, grads=grads)
        return {
            name: float(np.sqrt(np.mean((np.asarray(a, np.float64) - b) ** 2)))
            for name, a, b in zip(found._fields[:5], found, expected, strict=False)
        }

    of_two, of_eight = errors(2), errors(8)
    of_two.pop("lse")
    assert max(of_eight[name] / of_two[name] for name in of_two) <= 1.2


def _whole(mesh, local, **options):
    return jax.shard_map(local, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, **options)


def _stacked(*arrays):
    return [x[:, None] for x in arrays]


def _vmap_last(*arrays):
    mapped = jax.vmap(attend, in_axes=4, out_axes=4)
    return mapped(*(x[..., None] for x in arrays))[..., 0]


TRANSFORMED = {
    "plain": lambda mesh: _whole(mesh, attend),
    "unchecked": lambda mesh: _whole(mesh, attend, check_vma=False),
    "remat": lambda mesh: _whole(mesh, jax.checkpoint(attend)),
    "vmap inside": lambda mesh: _whole(
        mesh, jax.vmap(lambda *x: attend(*(y[None] for y in x))[0])
    ),
    "vmap outside": lambda mesh: (
        lambda *x: jax.vmap(_whole(mesh, attend))(*_stacked(*x))[:, 0]
    ),
    "vmap of the last dimension": lambda mesh: _whole(mesh, _vmap_last),
    "scan": lambda mesh: _whole(
        mesh, lambda *x: jax.lax.scan(lambda c, _: (c, attend(*x)), 0, None, 1)[1][0]
    ),
}


@pytest.mark.parametrize("transformed", TRANSFORMED)
def test_transforms_change_nothing(
    calls, mesh_of, inputs, dense, assert_close, transformed
):
    *arrays, (grad, grad_lse) = inputs((2, 16, 4, 8), (2, 16, 2, 8))
    whole = TRANSFORMED[transformed](mesh_of(4))
    out, *gradients = _results(whole, arrays, grad)
    assert calls
    no_lse = (grad, jnp.zeros_like(grad_lse))
    expected = dense(*arrays, is_causal=True, grads=no_lse)
    assert_close((out, None, *gradients), expected._replace(lse=None), 1e-5)


def test_vmap_over_queries_only(calls, mesh_of, inputs):
    query, key, value, _ = inputs((1, 16, 2, 8))
    split = jax.P(None, None, "context")

    def local(queries, key, value):
        return jax.vmap(attend, in_axes=(0, None, None))(queries, key, value)

    specs = {"in_specs": (split, SPLIT, SPLIT), "out_specs": split}
    mapped = jax.shard_map(local, mesh=mesh_of(4), **specs)
    queries = jnp.stack([query, 2 * query])
    found = jax.jit(mapped)(queries, key, value)
    assert calls
    by_xla = functools.partial(attend, implementation="xla")
    by_xla = jax.jit(_whole(mesh_of(4), by_xla))
    for q, out in zip(queries, found, strict=True):
        np.testing.assert_allclose(out, by_xla(q, key, value), atol=1e-5)


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


def test_eager_equals_jit(calls, mesh_of, inputs):
    query, key, value, _ = inputs((1, 8, 2, 8))
    whole = _whole(mesh_of(2), attend)
    expected = jax.jit(whole)(query, key, value)
    calls.clear()
    np.testing.assert_allclose(whole(query, key, value), expected, atol=1e-5)
    assert calls
