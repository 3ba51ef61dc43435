"""Compute a collective from the operands of all ranks, and keep this rank's part."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.communicator.replica_groups import IndexGroups
from jaxcomm.primitives import registry
from jaxcomm.primitives.call import Call
from jaxcomm.primitives.pvary import vary


def gathered(
    compute: Callable[[Sequence], Sequence],
    gather: Callable[[Sequence], Sequence],
    xs: Sequence,
    axes: tuple[str, ...],
) -> list[jax.Array]:
    """Return this rank's part of what ``compute`` makes of all ranks' operands.

    Args:
      compute: from the operands of all ranks, stacked along axis 0 in rank order, to
        results stacked likewise.
      gather: from this rank's operands to those of all ranks along ``axes``, stacked.
      xs: the operands of this rank.
      axes: the axis names, in the order that numbers the ranks.
    """
    return own_rows(compute(gather(xs)), axes)


def own_rows(outs: Sequence, axes: tuple[str, ...]) -> list[jax.Array]:
    """Return this rank's rows of results that are stacked in rank order."""
    rank = jax.lax.axis_index(axes)
    return [jax.lax.dynamic_index_in_dim(out, rank, 0, False) for out in outs]


def filled(x: jax.Array) -> jax.Array:
    """Return NaN, or what JAX fills other dtypes with: of an operation that is refused.

    Returns:
      A scalar of the dtype of ``x``.
    """
    return jnp.zeros((1,), x.dtype).at[1].get(mode="fill")


def emulate_groups(
    collective, stacked: Sequence, size: int, index_groups: IndexGroups, **params
) -> list:
    """Compute a collective on operands stacked along axis 0, group by group."""
    if index_groups is None:
        return collective.emulate_all(stacked, size, **params)
    order = np.array([rank for group in index_groups for rank in group])
    parts = [
        collective.emulate_all([x[np.array(g)] for x in stacked], len(g), **params)
        for g in index_groups
    ]
    place = np.argsort(order)
    return [jnp.concatenate(outs)[place] for outs in zip(*parts, strict=True)]


def all_gather(xs: Sequence, call: Call) -> list[jax.Array]:
    """Stack the operands of all ranks along axis 0, as a part of ``call``."""
    call = call.plain("all_gather")
    zeros = (0,) * len(xs)
    xs = vary(xs, call)
    return registry.bind("all_gather", xs, call, dimensions=zeros, tiled=False)
