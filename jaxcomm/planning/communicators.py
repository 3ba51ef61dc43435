"""The groups of a mesh, and what the communicators of them take of a rank.

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

from jaxcomm.communicator import backends
from jaxcomm.communicator.lane import DEFAULT_LANE
from jaxcomm.communicator.policy import CommPolicy
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
        """Return the classes of the groups of some axes, most groups first."""
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


_MIB = 1 << 20
# Device memory of a communicator with 32 channels, first use included: "Measured once"
# in docs/performance.md. The first that shares takes 806 MiB, eight take 218 each.
_OWN, _FIRST_SHARED, _NEXT_SHARED = 870 * _MIB, 806 * _MIB, 134 * _MIB
# Two more peers take 0.75 GiB: 32 channels of 10 MiB to receive and 2 MiB to send.
_PEER = 384 * _MIB
_CHANNELS = 32
# NCCL's buffer for a network, one for all peers: NCCL issue 2363.
_NETWORK = 512 * _MIB
# Of copies between processes: MappedCopies of the extension.
_MAPPED = 32 * _MIB
# Of ragged_all_to_all whose sizes GPUs read: two windows of DeviceSized.
_WINDOWS = 64 * _MIB

# Sizes of the extension's C++, once more, so that a plan needs no extension. A test
# compares them.
_PAGE, _LINE = 4096, 128

# Processes that can share one piece of memory: ffi/backends/host/arena/arena_memory.h.
MOST_SHARING_PROCESSES = 64
_HEADER, _CROSSING, _SEAT = 25_856, 1408, 128
_CROSSINGS, _INLINE_BYTES = 256, 4096
_ARENA_CHANNELS, _SLOTS, _SLOT_BYTES = 16, 8, 128 << 10

# Ranks of a group that our kernels serve, and the memory of each: OneShotMemory in
# ffi/backends/nccl/kernels/kernels.h.
_MOST_ADDING_RANKS = 8
_INBOX = (19 << 20) + 8192

# Mesh axes joined, index groups within them or None, lane, and backend.
Key = tuple[tuple[str, ...], IndexGroups, str, str]


@dataclasses.dataclass(frozen=True)
class PlannedCommunicator:
    """One communicator of the plan.

    Attributes:
      axes: the mesh axes joined, in the order that numbers the ranks.
      index_groups: what they are divided further by, or None.
      lane: its lane.
      backend: ``"host"``, ``"nccl"`` or ``"xla"``.
      groups: the classes of its groups, most groups first.
      shares: whether it uses the buffers of the mesh's communicator.
      device_bytes: device memory of the rank with most of it, once used.
      shared_bytes: memory that the processes of the host share, which all their
        communicators use.
      peers: ranks that a rank connects to.
    """

    axes: tuple[str, ...]
    index_groups: IndexGroups
    lane: str
    backend: str
    groups: tuple[GroupClass, ...]
    shares: bool
    device_bytes: int
    shared_bytes: int
    peers: int

    @property
    def size(self) -> int:
        """Ranks of its largest group."""
        return max(each.size for each in self.groups)

    @property
    def domains(self) -> int:
        """The most domains that a group spans."""
        return max(each.domains for each in self.groups)


def backend_of(
    backend: str | None, machine: Machine, groups: tuple[GroupClass, ...]
) -> str:
    """Return the backend that serves groups, as communicators choose it.

    Raises:
      ValueError: there is no backend of that name.
    """
    if backend is not None:
        return backends.named(backend).name
    if machine.platform in ("gpu", "cuda"):
        return "nccl"
    shares = all(
        each.hosts == 1 and each.processes <= MOST_SHARING_PROCESSES for each in groups
    )
    return "host" if machine.platform == "cpu" and shares else "xla"


def planned(
    keys: dict[Key, bool], devices: Devices, policy: CommPolicy
) -> list[PlannedCommunicator]:
    """Return the communicators of a plan, in the order given.

    Args:
      keys: what to make, and whether its ranks send to all others of their group, and
        not to their neighbors alone.
      devices: of the mesh.
      policy: how NCCL makes them.
    """
    found, has_shared = [], False
    for key, sends_to_all in keys.items():
        axes, index_groups, lane, backend = key
        groups = devices.groups(axes, index_groups)
        others = max(each.size for each in groups) - 1
        if others == 0:
            continue  # a group of one exchanges nothing
        shares = backend == "nccl" and policy.shares(lane == DEFAULT_LANE)
        device, shared = 0, 0
        if backend == "nccl":
            is_first = not (shares and has_shared)
            base = _OWN if not shares else _FIRST_SHARED if is_first else _NEXT_SHARED
            device = max(
                _on_device(each, policy, base, sends_to_all) for each in groups
            )
        if backend == "host" and any(each.processes > 1 for each in groups):
            shared = shared_memory_bytes(devices.processes)
        has_shared = has_shared or shares
        peers = others if sends_to_all else min(2, others)
        found.append(PlannedCommunicator(*key, groups, shares, device, shared, peers))
    return found


def _on_device(group, policy, base, sends_to_all) -> int:
    if group.size == 1:
        return 0
    channels = min(policy.max_ctas or _CHANNELS, _CHANNELS)
    # A ring's neighbors are part of the base.
    more = max(0, group.largest - 2) if sends_to_all else 0
    size = channels * (base + more * _PEER) // _CHANNELS
    if group.domains > 1 and base != _NEXT_SHARED:
        size += _NETWORK
    if policy.uses_one_shot and group.hosts == 1:
        size += inbox_bytes(group.size)
    if policy.uses_copy_engines and group.hosts == 1 < group.processes:
        size += _MAPPED
    if policy.device_sizes and group.hosts == 1 and group.size <= _MOST_ADDING_RANKS:
        size += _WINDOWS
    return size


def shared_memory_bytes(processes: int) -> int:
    """Return the shared memory of processes of a host.

    >>> shared_memory_bytes(2)
    36171776
    """
    row = _up_to(8 * processes, _LINE)
    crossings = _CROSSINGS * (_CROSSING + processes * (_SEAT + row))
    slots = _ARENA_CHANNELS * _SLOTS * _SLOT_BYTES
    of_each = _CROSSINGS * _INLINE_BYTES + slots
    return _up_to(_HEADER, _PAGE) + _up_to(crossings, _PAGE) + processes * of_each


def inbox_bytes(size: int) -> int:
    """Return the device memory for the kernels of a group; 0 if it has none.

    >>> inbox_bytes(2), inbox_bytes(8), inbox_bytes(9)
    (19931136, 19931136, 0)
    """
    return _INBOX if 2 <= size <= _MOST_ADDING_RANKS else 0


def _up_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
