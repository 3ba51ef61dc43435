"""Attention over a split sequence that takes and returns whole sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from dense import Attention, Options

import jaxcomm
from jaxcomm.attention.layout import Layout
from jaxcomm.attention.positions import TRUSTED

SPLIT = jax.P(None, "context")
_ROWS = jax.P(None, None, "context")


def ring_over(size):
    """Return a mesh of ``size`` devices along "context"."""
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((size,), ("context",), auto, devices=jax.devices()[:size])


def on_ranks(
    query, key, value, *, axis_name="context", schedule="contiguous", **options
):
    """Attend inside shard_map, with layouts that no token pads: of what is here."""
    size = jax.lax.axis_size(axis_name)
    axis = query.ndim - 3
    layout, key_layout = (
        Layout(schedule, size, size * x.shape[axis]) for x in (query, key)
    )
    return jaxcomm.ring_attention(
        query, key, value, axis_name=axis_name, layout=layout, positions=TRUSTED,
        key_layout=None if key_layout == layout else key_layout,
        key_positions=TRUSTED, **options,
    )  # fmt: skip


def attend(
    query,
    key,
    value,
    options: Options | None = None,
    grads=None,
    *,
    size,
    schedule="zigzag",
    key_schedule=None,
    check_vma=True,
    **others,
):
    """Reorder, attend over ``size`` devices, restore; any lengths.

    Args:
      query, key, value, options, grads: as ``dense.attention``.
      size: number of devices.
      schedule: of the queries, and of the keys if there is no other.
      key_schedule: of the keys.
      check_vma: as in ``jax.shard_map``.
      others: of ring_attention.
    """
    options = options or Options()
    layout = Layout(schedule, size, query.shape[1])
    key_layout = Layout(key_schedule or schedule, size, key.shape[1])
    mesh = ring_over(size)
    ids = options.query_ids, options.key_ids
    trained = options.bias, options.slopes, options.sinks

    is_one_sequence = key_layout == layout

    def local(query, key, value, trained, ids, lengths, positions):
        bias, slopes, sinks = trained
        return jaxcomm.ring_attention(
            query,
            key,
            value,
            bias,
            axis_name="context",
            layout=layout,
            positions=positions[0],
            key_layout=None if is_one_sequence else key_layout,
            key_positions=None if is_one_sequence else positions[1],
            is_causal=options.is_causal,
            local_window_size=options.window,
            query_segment_ids=ids[0],
            key_value_segment_ids=ids[1],
            query_seq_lengths=lengths[0],
            key_value_seq_lengths=lengths[1],
            sinks=sinks,
            logits_soft_cap=options.cap,
            alibi_slopes=slopes,
            return_residual=True,
            **others,
        )

    of_bias = None
    if options.bias is not None:
        of_bias = _ROWS if options.bias.shape[2] > 1 else jax.P()
    specs = (*[SPLIT] * 3, (of_bias, jax.P(), jax.P()), SPLIT, jax.P(), SPLIT)
    whole = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=SPLIT, check_vma=check_vma
    )

    @jax.jit
    def run(arrays, trained, ids, lengths, positions, grads):
        def function(*arrays):
            return whole(*arrays, ids, lengths, positions)

        if grads is None:
            return function(*arrays, trained), ()
        result, transpose = jax.vjp(function, *arrays, trained)
        return result, transpose(grads)

    def deal(x, of=layout, axis=1):
        return None if x is None else of.reorder(np.asarray(x), axis=axis)[0]

    if of_bias == _ROWS:
        trained = (deal(options.bias, axis=2), *trained[1:])
    sharding = jax.NamedSharding(mesh, SPLIT)
    put = functools.partial(jax.device_put, device=sharding)
    arrays = (deal(query), deal(key, key_layout), deal(value, key_layout))
    dealt = put(arrays), trained, put((deal(ids[0]), deal(ids[1], key_layout)))
    grads = None if grads is None else put(tuple(deal(x) for x in grads))
    lengths = options.query_lengths, options.key_lengths
    positions = {
        of: of.reorder(np.zeros(x.shape[:2]))[1]
        for of, x in ((layout, query), (key_layout, key))
    }
    given = put((positions[layout], positions[key_layout]))
    results, gradients = run(*dealt, lengths, given, grads)

    def back(x, of=layout, axis=1):
        return of.restore(np.asarray(x), positions[of][0], axis=axis)

    out, lse = (back(x) for x in results)
    if not gradients:
        return Attention(out, lse)
    *of_arrays, of_trained = gradients
    bias, slopes, sinks = of_trained
    if of_bias == _ROWS:
        bias = back(bias, axis=2)
    return Attention(
        out,
        lse,
        back(of_arrays[0]),
        back(of_arrays[1], key_layout),
        back(of_arrays[2], key_layout),
        *(None if x is None else np.asarray(x) for x in (bias, slopes, sinks)),
    )


def random_inputs(shape, key_shape=None, dtype=jnp.float32, seed=0, value_size=None):
    """Return query, key, value and the gradients of out and lse, normal."""
    rng = np.random.default_rng(seed)
    key_shape = key_shape or shape
    value_shape = (*key_shape[:-1], value_size or key_shape[-1])
    out_shape = (*shape[:-1], value_shape[-1])

    def normal(shape, dtype):
        # Rounded by numpy: nothing to compile.
        return jnp.asarray(rng.standard_normal(shape).astype(dtype))

    inputs = [normal(s, dtype) for s in (shape, key_shape, value_shape)]
    return (*inputs, (normal(out_shape, dtype), normal(shape[:3], jnp.float32)))


def assert_close(found, expected, tolerance):
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
