"""Attention over a split sequence that takes and returns whole sequences."""

import operator

import dense
import jax
import jax.numpy as jnp
import numpy as np
from dense import Attention, Options
from jax.experimental import multihost_utils

import jaxcomm
from jaxcomm.attention import Ranges
from jaxcomm.attention.layout import Layout, Tokens
from jaxcomm.attention.positions import TRUSTED
from jaxcomm.collectives.permute import ring_shift

PLAIN = Options()
SPLIT = jax.P(None, "context")
_ROWS = jax.P(None, None, "context")


def ring_over(size):
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((size,), ("context",), auto, devices=jax.devices()[:size])


def over_ring(size):
    """Return what splits a batch of sequences over such a mesh."""
    return jax.NamedSharding(ring_over(size), SPLIT)


def sharded(local, size=4, in_specs=SPLIT, out_specs=SPLIT, mesh=None, **options):
    """Map over ``size`` devices along "context", which split the tokens."""
    mesh = mesh or ring_over(size)
    return jax.shard_map(
        local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options
    )


def on_ranks(
    query, key, value, *, axis_name="context", schedule="contiguous", **options
):
    """Attend inside shard_map, with layouts that no token pads: of what is here."""
    size = jax.lax.axis_size(axis_name)
    axis = query.ndim - 3
    layout, key_layout = (
        Layout(schedule, size, size * x.shape[axis]) for x in (query, key)
    )
    tokens, key_tokens = Tokens(layout, TRUSTED), Tokens(key_layout, TRUSTED)
    options = {"strategy": "ring"} | options
    return jaxcomm.ring_attention(
        query, key, value, axis_name, tokens,
        key_tokens=None if key_layout == layout else key_tokens, **options,
    )  # fmt: skip


def results(function, arrays, grad):
    @jax.jit
    def run(arrays, grad):
        out, transpose = jax.vjp(function, *arrays)
        return out, *transpose(grad)

    return run(tuple(arrays), grad)


def attend(
    query,
    key,
    value,
    options=PLAIN,
    grads=None,
    *,
    size,
    schedule="zigzag",
    key_schedule=None,
    layout=None,
    mesh=None,
    return_residual=True,
    agrees=False,
    programs=None,
    **others,
):
    """Reorder, attend over ``size`` devices, restore; any lengths.

    Args:
      query, key, value, options, grads: as ``dense.attention``.
      size: number of devices.
      schedule: of the queries, and of the keys if there is no other.
      key_schedule: of the keys.
      layout: of queries and keys, in place of schedules.
      mesh: with an axis "data", which splits the batch.
      return_residual: if False, the residual found is None.
      agrees: whether the program knows what is sent of documents.
      programs: a dict that keeps what is compiled, for calls that differ in data alone.
      others: of ring_attention, whose strategy is the ring if none is given.
    """
    others = {"strategy": "ring"} | others
    key_layout = layout or Layout(key_schedule or schedule, size, key.shape[1])
    layout = layout or Layout(schedule, size, query.shape[1])
    is_one_sequence = key_layout == layout

    def local(trained, mask, tokens, key_tokens):
        query, key, value, bias, slopes, sinks = trained
        return jaxcomm.ring_attention(
            query, key, value, "context", tokens, key_tokens=key_tokens, bias=bias,
            mask=mask, is_causal=options.is_causal, local_window_size=options.window,
            sinks=sinks, alibi_slopes=slopes, logits_soft_cap=options.cap,
            return_residual=return_residual, **others,
        )  # fmt: skip

    # Keys of the same sequence without ids of their own have those of the queries.
    key_ids = options.key_ids
    if key_ids is None and is_one_sequence:
        key_ids = options.query_ids
    of_queries = options.query_ids, options.query_lengths
    of_keys = key_ids, options.key_lengths
    has_ids = any(x is not None for x in (*of_queries, *of_keys))
    is_shared = is_one_sequence and all(map(operator.is_, of_queries, of_keys))

    def deal(of, arrays, ids, lengths):
        if ids is None and has_ids:
            ids = np.zeros(of.length, np.int32)
        arrays = jax.tree.map(np.asarray, arrays)
        return of.reorder(arrays, segment_ids=ids, lengths=lengths)

    def table(x):
        """Deal the rows of a bias or a mask, if it has some, and say how to split."""
        if isinstance(x, Ranges):
            of_queries = layout.reorder(x.keys)[0] if x.keys else None
            of_keys = key_layout.reorder(x.queries)[0] if x.queries else None
            return Ranges(of_queries, of_keys), by
        if x is None or x.shape[2] == 1:
            return x, jax.P()
        return layout.reorder(np.asarray(x), axis=2)[0], _ROWS

    by = jax.P("data", "context") if mesh else SPLIT
    (bias, of_bias), (mask, of_mask) = table(options.bias), table(options.mask)
    (query, grads), tokens = deal(layout, (query, grads), *of_queries)
    (key, value), key_tokens = deal(key_layout, (key, value), *of_keys)
    if agrees:
        tokens = tokens.agreed()
    trained = query, key, value, bias, options.slopes, options.sinks
    specs = (*[by] * 3, of_bias, jax.P(), jax.P()), of_mask, by, by
    data = mask, tokens, None if is_shared else key_tokens
    whole = sharded(local, size, specs, by, mesh)

    @jax.jit
    def run(trained, data, grads):
        def function(*trained):
            return whole(trained, *data)

        if grads is None:
            return function(*trained), ()
        result, transpose = jax.vjp(function, *trained)
        return result, transpose(grads if return_residual else grads[0])

    if programs is not None:
        how = options.is_causal, options.window, options.cap, of_bias, of_mask
        how = *how, is_shared, size, mesh, return_residual, *sorted(others.items())
        run = programs.setdefault(how, run)
    result, gradients = run(trained, data, grads)
    out, lse = result if return_residual else (result, None)

    def back(x, of=tokens, axis=1):
        if not x.is_fully_addressable:
            x = multihost_utils.process_allgather(x, tiled=True)
        return of.restore(np.asarray(x), axis=axis)

    found = back(out), None if lse is None else back(lse)
    if not gradients:
        return Attention(*found)
    query, *keys, bias, slopes, sinks = gradients
    keys = [back(x, key_tokens) for x in keys]
    if of_bias == _ROWS:
        bias = back(bias, axis=2)
    return Attention(*found, back(query), *keys, bias, slopes, sinks)


def compare(query, key, value, options=PLAIN, grads=None, tolerance=1e-5, **how):
    found = attend(query, key, value, options, grads, **how)
    if grads is not None and found.lse is None:
        grads = grads[0], np.zeros_like(grads[1])
    expected = dense.attention(query, key, value, options, grads)
    if found.lse is None:
        expected = expected._replace(lse=None)
    assert_close(found, expected, tolerance)
    return found, expected


def compare_each(query, key, value, each, grads, tolerance=1e-5, **how):
    """Compare calls that differ in data alone, as in documents, by one program."""
    programs = {}
    for options in each:
        arrays = query, key, value
        compare(*arrays, options, grads, tolerance, programs=programs, **how)
    assert len(programs) == 1


def inputs(shape, key_shape=None, dtype=jnp.float32, seed=0, value_size=None):
    """Return query, key, value and the gradients of out and lse, normal."""
    rng = np.random.default_rng(seed)
    key_shape = key_shape or shape
    value_shape = (*key_shape[:-1], value_size or key_shape[-1])
    out_shape = (*shape[:-1], value_shape[-1])

    def normal(shape, dtype):
        # Rounded by numpy: nothing to compile.
        return jnp.asarray(rng.standard_normal(shape).astype(dtype))

    of = dtype if dtype == jnp.float64 else jnp.float32
    arrays = [normal(s, dtype) for s in (shape, key_shape, value_shape)]
    return (*arrays, (normal(out_shape, dtype), normal(shape[:3], of)))


def assert_close(found, expected, tolerance=1e-5):
    """Compare each result to the oracle, relative to the oracle's largest value.

    The residual of a row without a key is -inf on both sides, and no measure of others.
    """
    for name, a, b in zip(Attention._fields, found, expected, strict=False):
        if b is None:
            continue
        a = np.asarray(a, np.float64)
        assert a.shape == b.shape, (name, a.shape, b.shape)
        empty = np.isneginf(b)
        assert (np.isneginf(a) == empty).all(), name
        a, b = (np.where(empty, 0, x) for x in (a, b))
        error = np.abs(a - b).max(initial=0)
        assert error <= tolerance * max(1.0, np.abs(b).max(initial=0)), (name, error)


def assert_results(found, arrays, grad, options, tolerance=1e-5):
    """Compare an output and gradients of ``results`` to float64; no residual."""
    grads = grad, np.zeros(grad.shape[:3])
    expected = dense.attention(*arrays, options, grads)
    out, *gradients = found
    assert_close((out, None, *gradients), expected._replace(lse=None), tolerance)


class Blocking:
    """In place of a handle: what has arrived before anything is computed."""

    def __init__(self, tree, axis_name, *, shift):
        self._arrived = ring_shift(tree, axis_name, shift=shift)

    def then(self, x):
        return x

    def done(self, *, after):
        return self._arrived
