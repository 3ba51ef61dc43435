"""Which devices a collective joins, as classes: groups that see the same links.

Nothing here lists all groups or all ranks. The groups of some axes are one group, moved
by the other axes. Two of them see the same links if they begin at the same place within
a domain and a host. So there are at most as many classes as devices of a domain, a host
and a process have in common, whatever the size of the mesh.
"""

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
      domains, hosts, processes: that a group spans.
      per_domain, per_host, per_process: the fewest of its ranks in one of them.
      largest: the most of its ranks in one domain.
      example: the first device of one of the groups, and the distance to the second.
    """

    count: int
    size: int
    domains: int
    hosts: int
    processes: int
    per_domain: int
    per_host: int
    per_process: int
    largest: int
    example: tuple[int, int]


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
        self.domain = machine.domain
        self.host = machine.host
        # Groups that begin at equal places of this many devices see the same links.
        self._period = math.lcm(self.domain, self.host, self.per_process)
        self._ids = np.arange(self.size).reshape(self.shape)

    @property
    def processes(self) -> int:
        """How many processes there are."""
        return -(-self.size // self.per_process)

    @property
    def hosts(self) -> int:
        """How many hosts there are."""
        return -(-self.size // self.host)

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
        bases, offsets = self._bases_and_offsets(axes)
        places = bases.ravel() % self._period
        found: dict[GroupClass, int] = {}
        for place, count in zip(*np.unique(places, return_counts=True), strict=True):
            base = int(bases.ravel()[np.argmax(places == place)])
            for part in _parts(offsets, index_groups):
                made = self._class_of(base + part)
                # The example is the first, of several that are alike.
                like = next((c for c in found if _plain(c) == _plain(made)), made)
                found[like] = found.get(like, 0) + int(count)
        classes = [dataclasses.replace(c, count=n) for c, n in found.items()]
        return tuple(sorted(classes, key=lambda c: -c.count))

    def rank_codes(
        self, axes: tuple[str, ...], index_groups: IndexGroups = None
    ) -> np.ndarray:
        """Return the index in :meth:`groups` of each device's group."""
        if len(self.groups(axes, index_groups)) == 1:
            return np.zeros(self.size, np.int16)
        bases, offsets = self._bases_and_offsets(axes)
        known = [_plain(c) for c in self.groups(axes, index_groups)]
        parts = _parts(offsets, index_groups)
        places, inverse = np.unique(bases.ravel() % self._period, return_inverse=True)
        codes = np.empty((len(places), len(parts)), np.int16)
        for i in range(len(places)):
            base = int(bases.ravel()[np.argmax(inverse.ravel() == i)])
            for k, part in enumerate(parts):
                codes[i, k] = known.index(_plain(self._class_of(base + part)))
        found = np.empty(self.size, np.int16)
        for k, part in enumerate(parts):
            at = (bases.ravel()[:, None] + part[None, :]).ravel()
            found[at] = np.repeat(codes[inverse.ravel(), k], len(part))
        return found

    def _bases_and_offsets(self, axes):
        for axis in axes:
            if axis not in self.axis_names:
                raise ValueError(
                    f"plan: axis {axis!r} is not an axis of the mesh, which has "
                    f"{self.axis_names}"
                )
        at = [self.axis_names.index(axis) for axis in axes]
        moved = np.moveaxis(self._ids, at, range(len(at)))
        columns = moved.reshape(self.extent(axes), -1)
        return columns[0], columns[:, 0] - columns[0, 0]

    def _class_of(self, ids: np.ndarray) -> GroupClass:
        def spread(width):
            counts = np.unique(ids // width, return_counts=True)[1]
            return len(counts), int(counts.min()), int(counts.max())

        domains, per_domain, largest = spread(self.domain)
        hosts, per_host, _ = spread(self.host)
        processes, per_process, _ = spread(self.per_process)
        return GroupClass(
            count=1,
            size=len(ids),
            domains=domains,
            hosts=hosts,
            processes=processes,
            per_domain=per_domain,
            per_host=per_host,
            per_process=per_process,
            largest=largest,
            example=(int(ids[0]), int(ids[1] - ids[0]) if len(ids) > 1 else 0),
        )


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


def _parts(offsets: np.ndarray, index_groups: IndexGroups) -> list[np.ndarray]:
    if index_groups is None:
        return [offsets]
    groups = canonical_index_groups(index_groups, len(offsets))
    return [offsets[list(group)] for group in groups or ()]


def _plain(found: GroupClass) -> tuple:
    return dataclasses.astuple(dataclasses.replace(found, count=0, example=(0, 0)))
