"""Which devices a collective joins, as classes: groups that see the same links.

Nothing here lists all groups or all ranks. The groups of some axes are one group, moved
by the other axes. Two of them see the same links if they begin at the same place within
a domain and a host. So there are at most as many classes as devices of a domain, a host
and a process have in common, whatever the size of the mesh.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxcomm.communicator.replica_groups import IndexGroups, canonical_index_groups
from jaxcomm.machine import Machine


@dataclasses.dataclass(frozen=True)
class GroupClass:
    """Groups that see the same links.

    Attributes:
      count: how many there are.
      size: ranks of each.
      domains: that a group spans.
      hosts: that it spans.
      processes: that it spans.
      largest: the most of its ranks in one domain.
    """

    count: int
    size: int
    domains: int
    hosts: int
    processes: int
    largest: int


class Devices:
    """The devices of a mesh that may not exist: numbers, and where each is.

    Attributes:
      axis_names: the mesh's axes.
      shape: their sizes.
      size: how many devices there are.
      per_process: devices of a process.
    """

    def __init__(
        self, axes: Mapping[str, int], machine: Machine, per_process: int | None
    ):
        self.axis_names = tuple(axes)
        self.shape = tuple(axes.values())
        self.size = math.prod(self.shape)
        self.per_process = min(per_process or machine.host, self.size)
        self._widths = machine.domain, machine.host, self.per_process
        # Groups that begin at equal places of this many devices see the same links.
        self._period = math.lcm(*self._widths)
        self._ids = np.arange(self.size).reshape(self.shape)

    @property
    def processes(self) -> int:
        """How many processes there are."""
        return -(-self.size // self.per_process)

    def extent(self, axes: tuple[str, ...]) -> int:
        """Return the ranks along some axes."""
        return math.prod(self.shape[self.axis_names.index(axis)] for axis in axes)

    @functools.lru_cache(maxsize=256)  # noqa: B019 -- devices live as long as a plan
    def groups(
        self, axes: tuple[str, ...], index_groups: IndexGroups = None
    ) -> tuple[GroupClass, ...]:
        """Return the classes of the groups of some axes, most groups first.

        Raises:
          ValueError: if an axis is not the mesh's, or the index groups do not fit.
        """
        for axis in axes:
            if axis not in self.axis_names:
                raise ValueError(
                    f"plan: axis {axis!r} is not an axis of the mesh, which has "
                    f"{self.axis_names}"
                )
        at = [self.axis_names.index(axis) for axis in axes]
        moved = np.moveaxis(self._ids, at, range(len(at)))
        columns = moved.reshape(self.extent(axes), -1)
        firsts, offsets = columns[0], columns[:, 0] - columns[0, 0]
        parts = [offsets]
        if index_groups is not None:
            of = canonical_index_groups(index_groups, len(offsets)) or ()
            parts = [offsets[list(group)] for group in of]
        found: collections.Counter[tuple[int, ...]] = collections.Counter()
        places, counts = np.unique(firsts % self._period, return_counts=True)
        for place, count in zip(places, counts, strict=True):
            for part in parts:
                found[self._facts(place + part)] += int(count)
        return tuple(GroupClass(count, *facts) for facts, count in found.most_common())

    def _facts(self, ids: np.ndarray) -> tuple[int, ...]:
        """Return the attributes of a class but ``count``."""
        held = [
            np.unique(ids // width, return_counts=True)[1] for width in self._widths
        ]
        return len(ids), *map(len, held), int(held[0].max())


def axes_of(mesh: Any) -> dict[str, int]:
    """Return the sizes of a mesh's axes, by name, in order.

    >>> axes_of({"data": 2, "context": 4})
    {'data': 2, 'context': 4}

    Raises:
      TypeError: if it is no mesh.
      ValueError: if a size is not a positive integer.
    """
    if isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        return dict(mesh.shape)
    if not isinstance(mesh, Mapping) or not mesh:
        raise TypeError(
            f"plan: mesh must be a dictionary of axis sizes, a jax.sharding.Mesh or an "
            f"AbstractMesh, got {mesh!r}. Pass for example {{'data': 2, 'context': 4}}"
        )
    for name, size in mesh.items():
        if not isinstance(name, str) or isinstance(size, bool):
            raise TypeError(f"plan: mesh: {name!r}: {size!r} is no axis and its size")
        if not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(
                f"plan: mesh: axis {name!r} must have a positive size, got {size!r}"
            )
    return {name: int(size) for name, size in mesh.items()}
