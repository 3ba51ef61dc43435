"""Which devices a collective joins: mesh and axes to groups, ranks and a key.

Everything here is a pure function of its arguments, equal on every process and
in every run: a decision that differed between ranks would be a deadlock.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

IndexGroups = tuple[tuple[int, ...], ...] | None


@dataclasses.dataclass(frozen=True)
class DeviceGrid:
    """The devices of a mesh, in order.

    Attributes:
      axis_names: the mesh's axes.
      shape: their sizes.
      device_ids: global device ids, flattened in row-major order of the axes.
      platform: of the devices, as JAX names it. Each platform numbers its own from 0.
    """

    axis_names: tuple[str, ...]
    shape: tuple[int, ...]
    device_ids: tuple[int, ...]
    platform: str


@dataclasses.dataclass(frozen=True)
class Partition:
    """The groups a collective over some axes divides a mesh into.

    Attributes:
      grid: the devices.
      axes: the axes joined, in the order that numbers the ranks.
      index_groups: the ``axis_index_groups`` they are divided further by, or None.
      groups: device ids of each group, in rank order.
    """

    grid: DeviceGrid
    axes: tuple[str, ...]
    index_groups: IndexGroups
    groups: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of devices of each group."""
        return tuple(len(group) for group in self.groups)


def grid_of(mesh: jax.sharding.Mesh) -> DeviceGrid:
    """Return the device grid of a ``jax.sharding.Mesh``."""
    return DeviceGrid(
        axis_names=tuple(mesh.axis_names),
        shape=tuple(mesh.devices.shape),
        device_ids=tuple(int(device.id) for device in mesh.devices.flat),
        platform=mesh.devices.flat[0].platform,
    )


def canonical_axes(axis_name: Any) -> tuple[str, ...]:
    """Return the axis names as a tuple, from a name or a sequence of names."""
    if isinstance(axis_name, (set, frozenset)):
        raise TypeError(
            f"axis_name={axis_name!r} is a set, which has no order. Pass a name, or a "
            "tuple of names."
        )
    axes = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    try:
        hash(axes)
    except TypeError:
        raise TypeError(
            f"axis_name={axis_name!r} is neither a name nor a tuple of names"
        ) from None
    return axes


def canonical_index_groups(
    index_groups: Sequence[Sequence[int]] | None, axis_size: int | None = None
) -> IndexGroups:
    """Return ``axis_index_groups`` as nested tuples, checked."""
    if index_groups is None:
        return None
    groups = tuple(tuple(int(index) for index in group) for group in index_groups)
    found = sorted(index for group in groups for index in group)
    size = axis_size if axis_size is not None else len(found)
    if found != list(range(size)):
        raise ValueError(
            f"axis_index_groups must cover all indices exactly once: of axes with "
            f"{size} devices, got {groups}"
        )
    if not all(groups):
        raise ValueError(
            f"axis_index_groups must not have an empty group, got {groups}"
        )
    return groups


def partition(
    grid: DeviceGrid, axes: Sequence[str], index_groups: IndexGroups = None
) -> Partition:
    """Divide the devices of a grid into the groups of a collective.

    Ranks count in row-major order of ``axes``, in the order given, as
    ``jax.lax.axis_index(axes)`` does.

    Example:
      >>> grid = DeviceGrid(("data", "context"), (2, 2), (0, 1, 2, 3), "cpu")
      >>> partition(grid, ("data",)).groups
      ((0, 2), (1, 3))
    """
    axes = tuple(axes)
    for axis in axes:
        if axis not in grid.axis_names:
            raise ValueError(
                f"axis {axis!r} is not an axis of the mesh, which has {grid.axis_names}"
            )
    if len(set(axes)) != len(axes):
        raise ValueError(f"axes {axes} name an axis twice")
    ids = np.asarray(grid.device_ids, dtype=np.int64).reshape(grid.shape)
    positions = [grid.axis_names.index(axis) for axis in axes]
    size = math.prod(grid.shape[position] for position in positions)
    columns = np.moveaxis(ids, positions, range(len(positions))).reshape(size, -1)
    groups = tuple(tuple(int(i) for i in column) for column in columns.T)
    index_groups = canonical_index_groups(index_groups, size)
    if index_groups is not None:
        groups = tuple(
            tuple(group[i] for i in indices)
            for group in groups
            for indices in index_groups
        )
    return Partition(grid, axes, index_groups, groups)


def key(partition: Partition, lane: str, backend: str, policy: str = "") -> int:
    """Return the content hash that names a communicator, a signed 64-bit integer.

    It goes into the compiled program, so it holds nothing of this process: no
    pointer, handle, process id or rank.
    """
    grid = partition.grid
    content = json.dumps(
        [
            "jaxcomm-2",  # the meaning of what follows
            grid.platform,
            grid.axis_names,
            grid.shape,
            grid.device_ids,
            partition.axes,
            partition.index_groups,
            lane,
            backend,
            *([policy] if policy else []),
        ]
    )
    digest = hashlib.sha256(content.encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def in_mesh_order(axes: Sequence[str], mesh_axes: Sequence[str]) -> tuple[str, ...]:
    """Return the axes with those of the mesh in the mesh's order.

    ``jax.lax.ppermute`` counts devices in that order, however its axes are named. Axes
    that are not the mesh's (``jax.vmap``'s) keep their places.
    """
    if len(set(axes)) != len(axes):
        raise ValueError(f"axes {tuple(axes)} name an axis twice")
    known = iter([axis for axis in mesh_axes if axis in axes])
    return tuple(next(known) if axis in mesh_axes else axis for axis in axes)


def ranks_in_mesh_order(
    axes: Sequence[str], sizes: Sequence[int], mesh_axes: Sequence[str]
) -> list[int]:
    """Return for each rank along the axes as given its rank in the mesh's order.

    Args:
      axes: names, in an order of the caller's, in which ``jax.lax.axis_index`` counts.
      sizes: their extents.
      mesh_axes: the mesh's axes.

    >>> ranks_in_mesh_order(("b", "a"), (3, 2), ("a", "b"))
    [0, 3, 1, 4, 2, 5]
    """
    ordered = in_mesh_order(axes, mesh_axes)
    extents = dict(zip(axes, sizes, strict=True))
    numbers = np.arange(math.prod(sizes)).reshape([extents[axis] for axis in ordered])
    return numbers.transpose([ordered.index(axis) for axis in axes]).ravel().tolist()
