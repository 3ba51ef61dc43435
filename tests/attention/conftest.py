"""The float64 oracle, and a ring that takes and returns whole sequences."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.attention.sequence import reorder, restore
from jaxcomm.attention.strategies.ring import ring_attention

SPLIT = jax.P(None, "context")


class Attention(NamedTuple):
    """Results in natural order; the gradients are None where none were asked for."""

    out: Any
    lse: Any
    grad_query: Any = None
    grad_key: Any = None
    grad_value: Any = None


def dense_attention(query, key, value, *, is_causal=False, grads=None, chunk=256):
    """Attend in float64, a chunk of queries at a time, with gradients by hand.

    Args:
      query, key, value: (B, T, N, D), (B, S, K, D), (B, S, K, D).
      is_causal: as in ring_attention.
      grads: (B, T, N, D) and (B, T, N), the gradients of out and lse.
      chunk: queries at a time.
    """
    # Heads before tokens: products of matrices, which BLAS makes.
    query, key, value = (_heads_first(x) for x in (query, key, value))
    group = query.shape[1] // key.shape[1]
    key, value = (np.repeat(x, group, 1) for x in (key, value))
    scale = query.shape[3] ** -0.5
    out, lse = np.zeros_like(query), np.zeros(query.shape[:3])
    grad_query, grad_key, grad_value = map(np.zeros_like, (query, key, value))
    for start in range(0, query.shape[2], chunk):
        rows = slice(start, start + chunk)
        keys = slice(start + chunk if is_causal else None)
        scores = scale * query[:, :, rows] @ key[:, :, keys].mT
        if is_causal:
            row, column = np.ogrid[: scores.shape[2], : scores.shape[3]]
            scores[:, :, start + row < column] = -np.inf
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        weights /= total
        lse[:, :, rows] = (top + np.log(total))[..., 0]
        out[:, :, rows] = weights @ value[:, :, keys]
        if grads is None:
            continue
        grad_out, grad_lse = (_heads_first(x)[:, :, rows] for x in grads)
        delta = (grad_out * out[:, :, rows]).sum(-1) - grad_lse
        grad_scores = grad_out @ value[:, :, keys].mT - delta[..., None]
        grad_scores *= weights * scale
        grad_query[:, :, rows] = grad_scores @ key[:, :, keys]
        grad_key[:, :, keys] += grad_scores.mT @ query[:, :, rows]
        grad_value[:, :, keys] += weights.mT @ grad_out
    if grads is None:
        return Attention(out.swapaxes(1, 2), lse.swapaxes(1, 2))
    batch, heads, tokens, depth = key.shape
    shape = (batch, heads // group, group, tokens, depth)
    grad_key, grad_value = (x.reshape(shape).sum(2) for x in (grad_key, grad_value))
    results = out, lse, grad_query, grad_key, grad_value
    return Attention(*(x.swapaxes(1, 2) for x in results))


def _heads_first(x):
    return np.asarray(x, np.float64).swapaxes(1, 2)


def ring_over(size):
    """Return a mesh of ``size`` devices along "context"."""
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((size,), ("context",), auto, devices=jax.devices()[:size])


def attend_in_ring(
    query,
    key,
    value,
    *,
    size,
    schedule="zigzag",
    is_causal=False,
    grads=None,
    check_vma=True,
):
    """Reorder, attend in a ring of ``size`` devices, restore; any lengths.

    The ring is jitted alone: reordering a sharded array makes XLA add collectives of
    its own, which are not what is tested here.
    """
    length, key_length = query.shape[1], key.shape[1]
    mesh = ring_over(size)

    def local(query, key, value):
        return ring_attention(
            query,
            key,
            value,
            axis_name="context",
            is_causal=is_causal,
            schedule=schedule,
            length=length,
            key_length=key_length,
            return_residual=True,
        )

    attend = jax.shard_map(
        local, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=check_vma
    )

    @jax.jit
    def run(arrays, grads):
        if grads is None:
            return attend(*arrays), ()
        result, transpose = jax.vjp(attend, *arrays)
        return result, transpose(grads)

    def deal(x):
        padded = np.pad(x, [(0, int(axis == 1)) for axis in range(x.ndim)])
        return padded[:, _orders(size, schedule, x.shape[1])[0]]

    def whole(x, length):
        return np.asarray(x)[:, _orders(size, schedule, length)[1]]

    sharding = jax.NamedSharding(mesh, SPLIT)
    dealt = jax.tree.map(deal, ((query, key, value), grads))
    results, gradients = run(*jax.device_put(dealt, sharding))
    lengths = length, key_length, key_length
    return Attention(
        *(whole(x, length) for x in results), *map(whole, gradients, lengths)
    )


@functools.cache
def _orders(size, schedule, length):
    """Return where ``reorder`` finds each token, padding last, and where ``restore``.

    Compiled for the places alone, not for each operand in its shape and type.
    """

    @jax.jit
    def both():
        places = jnp.arange(1, length + 1)
        dealt = reorder(places, size, schedule=schedule, axis=0)
        places = jnp.arange(dealt.size)
        back = restore(places, size, schedule=schedule, axis=0, length=length)
        return dealt - 1, back

    return jax.tree.map(np.asarray, both())


def random_inputs(shape, key_shape=None, dtype=jnp.float32, seed=0):
    """Return query, key, value and the gradients of out and lse, normal."""
    rng = np.random.default_rng(seed)
    key_shape = key_shape or shape

    def normal(shape, dtype):
        # Rounded by numpy: nothing to compile.
        return jnp.asarray(rng.standard_normal(shape).astype(dtype))

    inputs = [normal(s, dtype) for s in (shape, key_shape, key_shape)]
    return (*inputs, (normal(shape, dtype), normal(shape[:3], jnp.float32)))


def assert_attention_close(found, expected, tolerance):
    """Compare each result to the oracle, relative to the oracle's largest value."""
    for name, a, b in zip(Attention._fields, found, expected, strict=True):
        if b is None:
            continue
        a = np.asarray(a, np.float64)
        assert a.shape == b.shape, name
        error = np.abs(a - b).max(initial=0)
        assert error <= tolerance * max(1.0, np.abs(b).max(initial=0)), (name, error)


@pytest.fixture(scope="session")
def dense():
    return dense_attention


@pytest.fixture(scope="session")
def ring():
    return attend_in_ring


@pytest.fixture(scope="session")
def inputs():
    return random_inputs


@pytest.fixture(scope="session")
def assert_close():
    return assert_attention_close


@pytest.fixture(scope="session")
def mesh_of():
    return ring_over
