"""Checksums beside the collectives: ``JAXCOMM_CHECKSUMS=1``.

XLA computes them of the very arrays that a collective takes and returns, and a callback
hands them to ``diagnostics/checksums.py``. So it is the same on every backend. Not the
backend's own parts of a call are recorded, but the call: what a backend makes of it may
depend on the number of ranks.

A checksum has 64 bits: two sums of hashes of word and position. Integers wrap around,
so the order of a sum does not matter. Whatever happens to one word changes both sums.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import compat, config
from jaxcomm.compat import host_calls
from jaxcomm.diagnostics import checksums
from jaxcomm.primitives.call import Call
from jaxcomm.primitives.rounded import rounded


class _Part(threading.local):
    # Whether what is lowered belongs to a call that is recorded.
    of_a_call = False


_part = _Part()


class _Numbers(Counter):
    """How many calls of a name and axes a program has so far."""


@contextlib.contextmanager
def _parts_unrecorded():
    before, _part.of_a_call = _part.of_a_call, True
    try:
        yield
    finally:
        _part.of_a_call = before


def _is_asked(ctx, call: Call) -> bool:
    """Say whether to record a call; remember one that cannot be."""
    if not config.checksums() or _part.of_a_call:
        return False
    if compat.concrete_mesh(ctx) is None:
        why = "the program is for no mesh of devices"
    elif compat.automatic_axes(ctx):
        why = "shard_map leaves axes to XLA"
    elif not host_calls.calls_host(ctx):
        why = "JAX calls no host from this platform"
    else:
        return True
    checksums.note_unrecorded(f"{call.where}: {why}")
    return False


def recorded(collective, ctx, operands: Sequence, call: Call, results_of: Callable):
    """Lower a call, and what records its checksums if they are asked for.

    Args:
      collective: that is called.
      ctx: of the lowering.
      operands: lowered.
      call: the call.
      results_of: lowers the call, from the operands to the results.
    """
    if not _is_asked(ctx, call):
        return results_of(operands)
    # What a device sends is what is summed, and not computed once more.
    operands = _rounded(ctx, ctx.avals_in, operands)
    with _parts_unrecorded():
        results = _rounded(ctx, ctx.avals_out, results_of(operands))
    _record(collective, ctx, operands, call, results)
    return results


def recorded_start(ctx, operands: Sequence, call: Call, begun: Callable):
    """Lower the start of a call, from the operands to what it returns."""
    if not _is_asked(ctx, call):
        return begun(operands)
    with _parts_unrecorded():
        return begun(_rounded(ctx, ctx.avals_in, operands))


def recorded_done(collective, ctx, held: Sequence, call: Call, results: Sequence):
    """Return the results of a call that has ended; record it if that is asked for."""
    if not _is_asked(ctx, call):
        return results
    call = call.replace(name=call.name.removesuffix("_start"))
    results = _rounded(ctx, ctx.avals_out, results)
    _record(collective, ctx, held, call, results)
    return results


def _record(collective, ctx, operands, call, results):
    """Lower what hands over the checksums of a call."""
    avals = [*ctx.avals_in[: len(operands)], *ctx.avals_out]
    mesh = compat.concrete_mesh(ctx)
    assert mesh is not None  # it is asked for
    site = _site(collective, ctx, mesh, call, len(operands))
    words = len(site.mesh) + 2 * len(avals)
    of_words = ctx.replace(
        avals_in=avals, avals_out=[host_calls.array_type((words,), np.uint32)]
    )
    with _parts_unrecorded():
        (found,) = compat.lower_as(
            lambda *xs: [_words(site.mesh, xs)], of_words, *operands, *results
        )
    hand_over = checksums.declare(site, mesh)
    host_calls.call_host(ctx, lambda x: hand_over(np.asarray(x).tolist()), found)


def _rounded(ctx, avals, arrays):
    ctx = ctx.replace(avals_in=avals, avals_out=avals)
    return compat.lower_as(lambda *xs: list(map(rounded, xs)), ctx, *arrays)


def _site(collective, ctx, mesh, call, leaves) -> checksums.Site:
    """Return what names the call in a record."""
    numbers = host_calls.kept_with_module(ctx, _Numbers)
    number = numbers[call.name, call.axes]
    numbers[call.name, call.axes] += 1
    return checksums.Site(
        program=compat.program_name(ctx),
        name=call.name,
        axes=tuple(map(str, call.axes)),
        number=number,
        scope=str(ctx.name_stack),
        collective=collective.name,
        replicated=collective.replicated and call.index_groups is None,
        mesh=tuple((str(axis), size) for axis, size in mesh.shape.items()),
        operands=tuple(map(_type, ctx.avals_in[:leaves])),
        results=tuple(map(_type, ctx.avals_out)),
    )


def _type(aval):
    return f"{aval.dtype.name}[{','.join(map(str, aval.shape))}]"


def _words(mesh, xs) -> jax.Array:
    """Return the device's coordinates in the mesh, and both halves of all checksums."""
    at = [
        jax.lax.axis_index(axis) if size > 1 else jnp.zeros((), jnp.int32)
        for axis, size in mesh
    ]
    halves = (half for x in xs for half in checksum(x))
    return jnp.stack([*(i.astype(jnp.uint32) for i in at), *halves])


# Of two hashes of 32 bits that keep all information: shifts and factors, in turn. The
# first is the finalizer of MurmurHash3 (Appleby, 2011), the second lowbias32 (Wellons).
_HASHES = ((16, 0x85EBCA6B, 13, 0xC2B2AE35, 16), (16, 0x21F0AAAD, 15, 0x735A2D97, 15))


def checksum(x: jax.Array) -> tuple[jax.Array, ...]:
    """Return both halves of an array's checksum, uint32."""
    words = _words_of(x)
    # Times an odd number: 2**32 positions differ.
    at = jax.lax.iota(jnp.uint32, words.size) * np.uint32(0x9E3779B9)
    return tuple(
        jnp.sum(_hashed(mixed, *steps), dtype=jnp.uint32)
        for mixed, steps in zip((words ^ at, words + at), _HASHES, strict=True)
    )


def _hashed(x, first, factor, second, other_factor, last):
    x = (x ^ (x >> first)) * np.uint32(factor)
    x = (x ^ (x >> second)) * np.uint32(other_factor)
    return x ^ (x >> last)


def _words_of(x) -> jax.Array:
    """Return the bits of an array, uint32, in one dimension."""
    if x.size == 0 or x.dtype == jax.dtypes.float0:
        return jnp.zeros(0, jnp.uint32)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    bits = jax.dtypes.itemsize_bits(x.dtype)
    if bits < 64:
        x = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}"))
    else:
        x = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return x.astype(jnp.uint32).reshape(-1)
