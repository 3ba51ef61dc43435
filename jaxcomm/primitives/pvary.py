"""Typing values as varying, or as reduced, over mesh axes, without moving anything.

The transpose is our own sum: see ``collectives/transposes.py``.
"""

from collections.abc import Sequence

import jax
import jax.extend
from jax.interpreters import ad

from jaxcomm import compat
from jaxcomm.primitives.call import Call


def vary(xs: Sequence, call: Call) -> list:
    """Type arrays as ``call.given`` wants them over ``call.axes``.

    Arrays that vary over an axis already stay as they are. So do all arrays outside of
    ``jax.shard_map(..., check_vma=True)``, where values have no such type.
    """
    xs = list(xs)
    missing: dict[tuple[str, ...], list[int]] = {}
    for i, x in enumerate(xs):
        lacks = call.lacking(x)
        if lacks:
            call.check_kind(jax.typeof(x))
            missing.setdefault(lacks, []).append(i)
    for lacks, indices in missing.items():
        outs = cast([xs[i] for i in indices], call.plain("pcast").replace(axes=lacks))
        for i, out in zip(indices, outs, strict=True):
            xs[i] = out
    return xs


def cast(xs: Sequence, call: Call) -> list:
    """Type equal arrays as ``call.to``, ``"varying"`` or ``"reduced"``."""
    return pvary_p.bind(*xs, call=call)


def _abstract_eval(*avals, call: Call):
    def typed(aval):
        axes = getattr(compat.kinds_of(aval), call.to) | frozenset(call.axes)
        return compat.with_manual_axes(aval, **{call.to: axes})

    return list(map(typed, avals))


def _jvp(primals, tangents, *, call: Call):
    outs = pvary_p.bind(*primals, call=call)
    out_tangents = [compat.zero_tangent(out) for out in outs]
    # Zeros stay symbolic: the transpose could not sum those of integers, float0.
    moving = [
        i
        for i, (x, t) in enumerate(zip(primals, tangents, strict=True))
        if compat.has_tangent(x) and not compat.is_zero_tangent(t)
    ]
    if moving:
        moved = pvary_p.bind(*[tangents[i] for i in moving], call=call)
        for i, tangent in zip(moving, moved, strict=True):
            out_tangents[i] = tangent
    return outs, out_tangents


def _batch(axis_data, operands, dims, *, call: Call):
    return pvary_p.bind(*operands, call=call), dims


pvary_p = jax.extend.core.Primitive("jaxcomm_pvary")
pvary_p.multiple_results = True
pvary_p.def_impl(lambda *operands, **_: list(operands))
pvary_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[pvary_p] = _jvp
compat.register_batching(pvary_p, _batch)
compat.register_lowering(pvary_p, lambda ctx, *operands, **_: list(operands))
