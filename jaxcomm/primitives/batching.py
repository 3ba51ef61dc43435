"""``jax.vmap`` of a collective: over another axis, or over one of its own."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm import compat
from jaxcomm.primitives.call import Call
from jaxcomm.primitives.gathered import all_gather, emulate_groups, gathered
from jaxcomm.primitives.rounded import rounded


def batch(collective, axis_data, operands, dims, *, call: Call, **params):
    """Batch a collective; operands' dims are None or int, results' None or 0."""
    if axis_data.name in call.axes:
        operands, _ = moved_to_front(collective, operands, dims, {})
        if not call.reproducible:
            return batch_own_axis(
                collective, axis_data, operands, dims, call=call, **params
            )
        # As if they travelled.
        operands = list(map(rounded, operands))
        outs, dims = batch_own_axis(
            collective, axis_data, operands, dims, call=call, **params
        )
        return list(map(rounded, outs)), dims
    operands, params = moved_to_front(collective, operands, dims, params)
    outs = collective.primitive.bind(*operands, call=call, **params)
    return outs, [None if d is None else 0 for d in dims]


def moved_to_front(
    collective, operands, dims, params: dict[str, Any]
) -> tuple[list, dict[str, Any]]:
    """Return operands whose batch dimension is 0 or None, and parameters to match."""
    operands = [
        x if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(operands, dims, strict=True)
    ]
    shifted = {
        param: tuple(
            dimension + (d is not None)
            for dimension, d in zip(params[param], dims, strict=True)
        )
        for param in collective.dimension_params
        if param in params
    }
    return operands, params | shifted


def batch_own_axis(collective, axis_data, operands, dims, *, call: Call, **params):
    """Batch over an axis of the collective: the mapped ranks are here already."""
    size, groups = axis_data.size, call.index_groups
    stacked = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else x
        for x, d in zip(operands, dims, strict=True)
    ]
    rest = tuple(axis for axis in call.axes if axis != axis_data.name)
    if not rest:
        outs = emulate_groups(collective, stacked, size, groups, **params)
        if collective.replicated and groups is None:
            return [out[0] for out in outs], [None] * len(outs)
        return outs, [0] * len(outs)

    place = call.axes.index(axis_data.name)
    # Else what is added here is no node of the tree over all ranks.
    is_node = place == len(rest) and size & (size - 1) == 0
    may_fold = groups is None and (is_node or not call.reproducible)
    partial = collective.fold(stacked, **params) if may_fold else None
    if partial is not None:
        outs = collective.primitive.bind(
            *partial, call=call.replace(axes=rest), **params
        )
        outs = [out.astype(x.dtype) for out, x in zip(outs, stacked, strict=True)]
        return outs, [None] * len(outs)

    rest_shape = tuple(compat.axis_size(axis) for axis in rest)
    total = size * math.prod(rest_shape)

    def compute(every):
        """From (ranks of ``rest``, mapped, ...) to the same shape of results."""
        split = [x.reshape(*rest_shape, *x.shape[1:]) for x in every]
        ranks = [jnp.moveaxis(x, len(rest), place) for x in split]
        flat = [x.reshape(total, *x.shape[len(call.axes) :]) for x in ranks]
        outs = emulate_groups(collective, flat, total, groups, **params)
        shape = (*rest_shape[:place], size, *rest_shape[place:])
        outs = [
            jnp.moveaxis(out.reshape(*shape, *out.shape[1:]), place, len(rest))
            for out in outs
        ]
        return [jax.lax.collapse(out, 0, len(rest)) for out in outs]

    def gather(xs):
        return all_gather(xs, call.replace(axes=rest))

    outs = gathered(compute, gather, stacked, rest)
    return outs, [0] * len(outs)
