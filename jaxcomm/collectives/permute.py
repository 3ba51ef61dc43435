"""Permutations: ppermute, pshuffle, ring_shift."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import compat
from jaxcomm.communicator import replica_groups
from jaxcomm.errors import OutOfRangeError
from jaxcomm.primitives import arguments, lax, request
from jaxcomm.primitives.call import AxisName, Call, PyTree, call_of
from jaxcomm.primitives.collective import Collective, define
from jaxcomm.primitives.request import Request, public


@public
def ppermute(
    name: str,
    x: PyTree,
    axis_name: AxisName,
    perm: Sequence[tuple[int, int]],
    *,
    lane: str | None = None,
    backend: str | None = None,
) -> Request:
    """Send ``x`` from device to device; a twin of ``jax.lax.ppermute``.

    A device's result is there as soon as the one it receives from has arrived; it
    does not wait for the rest.

    Args:
      x: a pytree of arrays of any shape and dtype. Its leaves travel in one call.
      axis_name: an axis name, or a tuple of names, whose devices count in the mesh's
        order of axes.
      perm: pairs (source, destination) of indices along the axis. No index may be a
        source twice, nor a destination. Where nothing arrives the result is zero.
      lane, backend: to use; see :func:`jaxcomm.init` and :func:`jaxcomm.using`.

    Returns:
      A pytree like ``x``.

    Raises:
      NameError: if the axis is not bound.
      TypeError: if ``perm`` is no sequence of pairs of integers.
      ValueError: if an index is out of range or stands twice on one side.

    Example:
      >>> f = jax.shard_map(
      ...     lambda x: jaxcomm.ppermute(x, "i", [(0, 1), (1, 0)]),
      ...     in_specs=jax.P("i"),
      ...     out_specs=jax.P("i"),
      ... )
      >>> f(jnp.arange(4))
      Array([1, 0, 0, 0], dtype=int32)
    """
    return _permutation(x, call_of(name, axis_name, None, lane, backend), perm)


@public
def pshuffle(
    name: str,
    x: PyTree,
    axis_name: AxisName,
    perm: Sequence[int],
    *,
    lane: str | None = None,
    backend: str | None = None,
) -> Request:
    """Permute devices; a twin of ``jax.lax.pshuffle``.

    Args:
      x: as in :func:`ppermute`.
      axis_name: as in :func:`ppermute`.
      perm: for each index along the axis the index its result comes from.
      lane: as in :func:`ppermute`.
      backend: as in :func:`ppermute`.

    Returns:
      A pytree like ``x``.

    Raises:
      NameError: if the axis is not bound.
      TypeError: if ``perm`` is no sequence of integers.
      ValueError: if ``perm`` is not a permutation of all indices.

    Example:
      >>> f = jax.shard_map(
      ...     lambda x: jaxcomm.pshuffle(x, "i", [3, 2, 1, 0]),
      ...     in_specs=jax.P("i"),
      ...     out_specs=jax.P("i"),
      ... )
      >>> f(jnp.arange(4))
      Array([3, 2, 1, 0], dtype=int32)
    """
    call = call_of(name, axis_name, None, lane, backend)
    perm = arguments.indices(perm, call)
    if sorted(perm) != list(range(len(perm))):
        raise ValueError(f"pshuffle: perm must be a permutation of indices, got {perm}")
    if len(perm) != call.group_size:
        raise ValueError(
            f"{call.where}: perm must be a permutation of all "
            f"{call.group_size} indices, got {perm}"
        )
    pairs = [(source, target) for target, source in enumerate(perm)]
    return _permutation(x, call, pairs)


@public
def ring_shift(
    name: str,
    x: PyTree,
    axis_name: AxisName,
    shift: int = 1,
    *,
    lane: str | None = None,
    backend: str | None = None,
) -> Request:
    """Send ``x`` round the ring: what device r has goes to r + shift, modulo size.

    One hop of a ring algorithm; K and V as one pytree are one call.

    Args:
      x: as in :func:`ppermute`.
      axis_name: an axis name, or a tuple of names, whose devices count in that order:
        r is ``jax.lax.axis_index(axis_name)``.
      shift: how far; negative to go the other way round.
      lane: as in :func:`ppermute`.
      backend: as in :func:`ppermute`.

    Returns:
      A pytree like ``x``.

    Raises:
      NameError: if the axis is not bound.
      TypeError: if ``shift`` is no integer.

    Example:
      >>> f = jax.shard_map(
      ...     lambda x: jaxcomm.ring_shift(x, "i"),
      ...     in_specs=jax.P("i"),
      ...     out_specs=jax.P("i"),
      ... )
      >>> f(jnp.arange(4))
      Array([3, 0, 1, 2], dtype=int32)
    """
    call = call_of(name, axis_name, None, lane, backend)
    shift = arguments.integer(shift, f"{call.where}: shift")
    sizes = [compat.axis_size(axis) for axis in call.axes]
    ranks = replica_groups.ranks_in_mesh_order(call.axes, sizes, _mesh_axes())
    pairs = [(rank, ranks[(r + shift) % len(ranks)]) for r, rank in enumerate(ranks)]
    return _permutation(x, call, pairs)


def _mesh_axes() -> tuple[str, ...]:
    return jax.sharding.get_abstract_mesh().axis_names


def _permutation(x: PyTree, call: Call, perm: Sequence[tuple[int, int]]) -> Request:
    """Check a permutation, which numbers ranks in the mesh's order of axes."""
    call = call.replace(axes=replica_groups.in_mesh_order(call.axes, _mesh_axes()))
    size = call.group_size
    perm = arguments.index_pairs(perm, call)
    for what, indices in (
        ("source", [source for source, _ in perm]),
        ("destination", [target for _, target in perm]),
    ):
        outside = [index for index in indices if not 0 <= index < size]
        if outside:
            raise OutOfRangeError(
                f"{call.where}: {what} {outside[0]} is not among the {size} "
                f"indices 0 .. {size - 1}; perm is {perm}"
            )
        if len(set(indices)) != len(indices):
            raise ValueError(
                f"{call.where}: sources and destinations must be unique, got {perm}"
            )
    return Request(PERMUTE, request.as_arrays(x, call), call, perm=perm)


class Permute(Collective):
    """Parameter: perm, pairs (source, destination)."""

    name = "permute"

    def planner_params(self, avals, size, *, perm):
        source_of = {target: source for source, target in perm}
        return [source_of.get(rank, -1) for rank in range(size)]

    def emulate(self, x, i, *, perm):
        if not perm:
            return jnp.zeros_like(x)
        sources, targets = np.array(perm).T
        return jnp.zeros_like(x).at[targets].set(x[sources])

    def xla(self, xs, call, *, perm):
        return [lax.ppermute(x, call.axes, perm) for x in xs]


PERMUTE = Permute()
define(PERMUTE)
