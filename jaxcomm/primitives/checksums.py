"""Checksums beside the collectives: ``JAXCOMM_CHECKSUMS=1``.

XLA computes them of the very arrays that a collective takes and returns, and a callback
hands them to ``diagnostics/checksums.py``. So it is the same on every backend. Not the
backend's own parts of a call are recorded, but the call: what a backend makes of it may
depend on the number of ranks.

A checksum has 64 bits. The first half is a sum of the array's words, each times an odd
number of its own. The second half is a sum of hashes of word and position. Integers wrap
around, so the order of the sums does not matter. Whatever happens to one word changes
both halves.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import compat, config
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


def _is_asked() -> bool:
    return config.checksums() and not _part.of_a_call


def recorded(collective, ctx, operands: Sequence, call: Call, results_of: Callable):
    """Lower a call, and what records its checksums if they are asked for.

    Args:
      collective: that is called.
      ctx: of the lowering.
      operands: lowered.
      call: the call.
      results_of: lowers the call, from the operands to the results.
    """
    if not _is_asked():
        return results_of(operands)
    # What a device sends is what is summed, and not computed once more.
    operands = _rounded(ctx, ctx.avals_in, operands)
    with _parts_unrecorded():
        results = _rounded(ctx, ctx.avals_out, results_of(operands))
    _record(collective, ctx, operands, call, results)
    return results


def recorded_start(ctx, operands: Sequence, begun: Callable):
    """Lower the start of a call, from the operands to what it returns."""
    if not _is_asked():
        return begun(operands)
    with _parts_unrecorded():
        return begun(_rounded(ctx, ctx.avals_in, operands))


def recorded_done(collective, ctx, held: Sequence, call: Call, results: Sequence):
    """Return the results of a call that has ended; record it if that is asked for."""
    if not _is_asked():
        return results
    call = call.replace(name=call.name.removesuffix("_start"))
    results = _rounded(ctx, ctx.avals_out, results)
    _record(collective, ctx, held, call, results)
    return results


def _record(collective, ctx, operands, call, results):
    """Lower what hands over the checksums of a call."""
    avals = [*ctx.avals_in[: len(operands)], *ctx.avals_out]
    site = _site(collective, ctx, call, len(operands))
    if isinstance(site, str):
        checksums.note_unrecorded(f"{call.where}: {site}")
        return
    words = len(site.mesh) + 2 * len(avals)
    of_words = ctx.replace(
        avals_in=avals, avals_out=[jax.core.ShapedArray((words,), np.uint32)]
    )
    with _parts_unrecorded():
        (found,) = compat.lower_as(
            lambda *xs: [_words(site.mesh, xs)], of_words, *operands, *results
        )
    compat.call_host(ctx, lambda x: checksums.add(site, np.asarray(x).tolist()), found)


def _rounded(ctx, avals, arrays):
    ctx = ctx.replace(avals_in=avals, avals_out=avals)
    return compat.lower_as(lambda *xs: list(map(rounded, xs)), ctx, *arrays)


def _site(collective, ctx, call, leaves) -> checksums.Site | str:
    """Return what names the call in a record, or why it cannot be recorded."""
    mesh = compat.concrete_mesh(ctx)
    if mesh is None:
        return "the program is for no mesh of devices"
    if compat.automatic_axes(ctx):
        return "shard_map leaves axes to XLA"
    if not compat.calls_host(ctx):
        return "JAX has no callbacks on this platform"
    numbers = compat.kept_with_module(ctx, _Numbers)
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


def checksum(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return both halves of an array's checksum, uint32."""
    words = _words_of(x)
    at = jax.lax.iota(jnp.uint32, words.size)
    first = jnp.sum(words * (2 * at + 1), dtype=jnp.uint32)
    # Each step can be undone, so that other words have other hashes (Appleby's
    # MurmurHash3, the finalizer of 32 bits).
    mixed = words ^ (at * np.uint32(0x9E3779B9))
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * np.uint32(0xC2B2AE35)
    return first, jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def _words_of(x) -> jax.Array:
    """Return the bits of an array, uint32, in one dimension."""
    if x.size == 0 or x.dtype == jax.dtypes.float0:
        return jnp.zeros(0, jnp.uint32)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    bits = jax.dtypes.itemsize_bits(x.dtype)
    if bits < 8 or bits < 64:
        x = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}"))
    else:
        x = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return x.astype(jnp.uint32).reshape(-1)
