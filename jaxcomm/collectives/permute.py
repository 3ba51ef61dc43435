"""Permutations: ppermute, pshuffle, ring_shift."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import compat
from jaxcomm.communicator import replica_groups
from jaxcomm.primitives import define


def ppermute(x, axis_name, perm, *, lane=None, backend=None):
    """Sends ``x`` from device to device; a twin of ``jax.lax.ppermute``.

    A device's result is there as soon as the one it receives from has arrived; it
    does not wait for the rest.

    Args:
      x: a pytree of arrays of any shape and dtype. Its leaves travel in one call.
      axis_name: an axis name, or a tuple of names, whose devices count in the mesh's
        order of axes.
      perm: pairs (source, destination) of indices along the axis. No index may be a
        source twice, nor a destination. Where nothing arrives the result is zero.
      lane: the lane to go through. If None, the default one.
      backend: ``"host"``, ``"nccl"`` or ``"xla"``. If None, what :func:`jaxcomm.init`
        chose for these axes, else the platform's own.

    Returns:
      A pytree like ``x``.

    Raises:
      NameError: if the axis is not bound.
      TypeError: if ``perm`` is no sequence of pairs of integers.
      ValueError: if an index is out of range or stands twice on one side.

    Example:
      On a mesh of 4 devices along ``"i"``, with ``x`` 0, 1, 2, 3 on them:

      >>> jaxcomm.ppermute(x, "i", [(0, 1), (1, 0)])  # 1, 0, 0, 0  # doctest: +SKIP
    """
    return permute_by(perm, "ppermute", x, axis_name, lane, backend)


def pshuffle(x, axis_name, perm, *, lane=None, backend=None):
    """Permutes devices; a twin of ``jax.lax.pshuffle``.

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
      On a mesh of 4 devices along ``"i"``, with ``x`` 0, 1, 2, 3 on them:

      >>> jaxcomm.pshuffle(x, "i", [3, 2, 1, 0])  # 3, 2, 1, 0  # doctest: +SKIP
    """
    axes = replica_groups.canonical_axes(axis_name)
    perm = define.indices(perm, axes, "pshuffle")
    if sorted(perm) != list(range(len(perm))):
        raise ValueError(f"pshuffle: perm must be a permutation of indices, got {perm}")
    compat.check_axes_bound(axes, "pshuffle")
    if len(perm) != define.group_size(axes):
        raise ValueError(
            f"pshuffle over {axes}: perm must be a permutation of all "
            f"{define.group_size(axes)} indices, got {perm}"
        )
    pairs = [(source, target) for target, source in enumerate(perm)]
    return permute_by(pairs, "pshuffle", x, axis_name, lane, backend)


def ring_shift(x, axis_name, shift=1, *, lane=None, backend=None):
    """Sends ``x`` round the ring: what device r has goes to r + shift, modulo size.

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
      On a mesh of 4 devices along ``"i"``, with ``x`` 0, 1, 2, 3 on them:

      >>> jaxcomm.ring_shift(x, "i")  # 3, 0, 1, 2  # doctest: +SKIP
    """
    pairs = ring_pairs(axis_name, shift, "ring_shift")
    return permute_by(pairs, "ring_shift", x, axis_name, lane, backend)


def ring_pairs(axis_name, shift: int, name: str) -> list[tuple[int, int]]:
    """Returns the permutation that sends rank r's to r + shift, modulo size.

    It is for :func:`permute_by`, which numbers ranks in the mesh's order.
    """
    axes = replica_groups.canonical_axes(axis_name)
    compat.check_axes_bound(axes, name)
    shift = define.integer(shift, f"{name} over {axes}: shift")
    sizes = [define.group_size((axis,)) for axis in axes]
    ranks = replica_groups.ranks_in_mesh_order(axes, sizes, _mesh_axes())
    return [(rank, ranks[(r + shift) % len(ranks)]) for r, rank in enumerate(ranks)]


def _mesh_axes() -> tuple[str, ...]:
    return jax.sharding.get_abstract_mesh().axis_names


def permute_by(perm, name: str, x, axis_name, lane, backend, bind=define.bind):
    """Checks a permutation and hands it to ``bind``, for the function ``name``."""
    axes = replica_groups.in_mesh_order(
        replica_groups.canonical_axes(axis_name), _mesh_axes()
    )
    compat.check_axes_bound(axes, name)
    size = define.group_size(axes)
    perm = define.index_pairs(perm, axes, name)
    for what, indices in (
        ("source", [source for source, _ in perm]),
        ("destination", [target for _, target in perm]),
    ):
        outside = [index for index in indices if not 0 <= index < size]
        if outside:
            raise ValueError(
                f"{name} over {axes}: {what} {outside[0]} is not among the {size} "
                f"indices 0 .. {size - 1}; perm is {perm}"
            )
        if len(set(indices)) != len(indices):
            raise ValueError(
                f"{name} over {axes}: sources and destinations must be unique, "
                f"got {perm}"
            )
    return bind(permute, x, axes, name=name, lane=lane, backend=backend, perm=perm)


class Permute(define.Collective):
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

    def xla(self, xs, axes, index_groups, *, perm):
        return [jax.lax.ppermute(x, axes, perm) for x in xs]

    def dual(self, *, perm, **params):
        inverse = tuple((target, source) for source, target in perm)
        return self, {"perm": inverse, **params}


permute = Permute()
permute_p = define.define(permute)
