"""``jax.vmap`` of a collective: over another axis, or over one of its own."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import compat


def batch(collective, axis_data, operands, dims, *, axes, **params):
    """Batches a collective; operands' dims are None or int, results' None or 0."""
    if axis_data.name in axes:
        operands, _ = moved_to_front(collective, operands, dims, {})
        return batch_own_axis(
            collective, axis_data, operands, dims, axes=axes, **params
        )
    operands, params = moved_to_front(collective, operands, dims, params)
    outs = collective.primitive.bind(*operands, axes=axes, **params)
    return outs, [None if d is None else 0 for d in dims]


def moved_to_front(collective, operands, dims, params):
    """Returns operands whose batch dimension is 0 or None, and parameters to match."""
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


def batch_own_axis(
    collective, axis_data, operands, dims, *, axes, index_groups, name, lane, backend,
    invariant, **params,
):  # fmt: skip
    """vmap over an axis of the collective: the mapped ranks are here already."""
    size = axis_data.size
    stacked = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else x
        for x, d in zip(operands, dims, strict=True)
    ]
    rest = tuple(axis for axis in axes if axis != axis_data.name)
    if not rest:
        outs = emulate_groups(collective, stacked, size, index_groups, **params)
        if collective.replicated and index_groups is None:
            return [out[0] for out in outs], [None] * len(outs)
        return outs, [0] * len(outs)

    partial = collective.fold(stacked, **params) if index_groups is None else None
    if partial is not None:
        outs = collective.primitive.bind(
            *partial, axes=rest, index_groups=None, name=name, lane=lane,
            backend=backend, invariant=invariant, **params,
        )  # fmt: skip
        return outs, [None] * len(outs)

    from jaxcomm.collectives.all_gather import all_gather  # itself such a primitive

    place = axes.index(axis_data.name)
    rest_shape = tuple(compat.axis_size(axis) for axis in rest)
    every = all_gather(stacked, rest, lane=lane, backend=backend)
    every = [
        jnp.moveaxis(x.reshape(*rest_shape, *x.shape[1:]), len(rest), place)
        for x in every
    ]
    total = size * math.prod(rest_shape)
    every = [x.reshape(total, *x.shape[len(axes) :]) for x in every]
    outs = emulate_groups(collective, every, total, index_groups, **params)
    ranks_shape = (*rest_shape[:place], size, *rest_shape[place:])
    outs = [
        jnp.moveaxis(out.reshape(*ranks_shape, *out.shape[1:]), place, len(rest))
        for out in outs
    ]
    mine = jax.lax.axis_index(rest)
    outs = [
        jax.lax.dynamic_index_in_dim(
            out.reshape(-1, *out.shape[len(rest) :]), mine, 0, False
        )
        for out in outs
    ]
    return outs, [0] * len(outs)


def emulate_groups(collective, stacked, size, index_groups, **params) -> list:
    """Computes a collective on operands stacked along axis 0, group by group."""
    if index_groups is None:
        return collective.emulate_all(stacked, size, **params)
    order = np.array([rank for group in index_groups for rank in group])
    parts = [
        collective.emulate_all([x[np.array(g)] for x in stacked], len(g), **params)
        for g in index_groups
    ]
    place = np.argsort(order)
    return [jnp.concatenate(outs)[place] for outs in zip(*parts, strict=True)]
