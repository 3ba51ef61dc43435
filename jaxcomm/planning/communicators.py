"""The communicators of a mesh, and what each takes of a rank, by published figures."""

import dataclasses

from jaxcomm import _ffi
from jaxcomm.communicator import backends
from jaxcomm.communicator.lane import DEFAULT_LANE
from jaxcomm.communicator.policy import CommPolicy
from jaxcomm.communicator.replica_groups import IndexGroups
from jaxcomm.machine import Machine
from jaxcomm.planning.figure import NOTHING, Figure
from jaxcomm.planning.groups import Devices, GroupClass

_MIB = 1 << 20
# Device memory of a communicator with 32 channels, first use included: docs/performance
# "Memory of a communicator". The first that shares takes 806 MiB, eight take 218 each.
_OWN, _FIRST_SHARED, _NEXT_SHARED = 870 * _MIB, 806 * _MIB, 134 * _MIB
# Two more peers take 0.75 GiB: 32 channels of 10 MiB to receive and 2 MiB to send.
_PEER = 384 * _MIB
_CHANNELS = 32
# NCCL's buffer for a network, one for all peers: NCCL issue 2363.
_NETWORK = 512 * _MIB
# NCCL_WORK_FIFO_BYTES.
_PINNED = 1 * _MIB


@dataclasses.dataclass(frozen=True)
class Key:
    """What tells communicators of a mesh apart.

    Attributes:
      axes: the mesh axes joined, in the order that numbers the ranks.
      index_groups: what they are divided further by, or None.
      lane: its lane.
      backend: ``"host"``, ``"nccl"`` or ``"xla"``.
    """

    axes: tuple[str, ...]
    index_groups: IndexGroups = None
    lane: str = DEFAULT_LANE
    backend: str = "nccl"


@dataclasses.dataclass(frozen=True)
class PlannedCommunicator:
    """One communicator of the plan, as the rank with the most of it sees it.

    Attributes:
      key: axes, index groups, lane and backend.
      groups: the classes of its groups, most groups first.
      shares: whether it uses the buffers of the mesh's communicator.
      by_class: device memory of a rank of each class, once used.
      pinned_bytes: page-locked memory of the host, for each rank.
      host_bytes: ordinary and shared memory of its process.
      peers: ranks that a rank connects to.
    """

    key: Key
    groups: tuple[GroupClass, ...]
    shares: bool
    by_class: tuple[Figure, ...]
    pinned_bytes: Figure
    host_bytes: Figure
    peers: int

    @property
    def device_bytes(self) -> Figure:
        """Device memory of the rank that has most."""
        return max(self.by_class, key=lambda figure: figure.value)

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
        each.hosts == 1 and each.processes <= _ffi.MOST_SHARING_PROCESSES
        for each in groups
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
        groups = devices.groups(key.axes, key.index_groups)
        if max(each.size for each in groups) == 1:
            continue  # a group of one exchanges nothing
        shares = key.backend == "nccl" and policy.shares(key.lane == DEFAULT_LANE)
        peers = max(
            each.size - 1 if sends_to_all else min(2, each.size - 1) for each in groups
        )
        device = (NOTHING,) * len(groups)
        pinned, host = NOTHING, NOTHING
        if key.backend == "nccl" and policy.source == "own":
            is_first = not (shares and has_shared)
            base = _OWN if not shares else _FIRST_SHARED if is_first else _NEXT_SHARED
            device = tuple(
                _on_device(each, policy, base, sends_to_all) for each in groups
            )
            pinned = Figure(_PINNED, "t")
        if key.backend != "xla":
            host = _on_host(key, groups, devices)
        has_shared = has_shared or shares
        found.append(
            PlannedCommunicator(key, groups, shares, device, pinned, host, peers)
        )
    return found


def can_add(group: GroupClass) -> bool:
    """Return whether the kernel for small sums serves a group's ranks."""
    return group.hosts == 1 and _ffi.one_shot_bytes(group.size) > 0


def _on_device(group, policy, base, sends_to_all) -> Figure:
    if group.size == 1:
        return NOTHING
    channels = min(policy.max_ctas or _CHANNELS, _CHANNELS) / _CHANNELS
    # A ring's neighbors are part of the base.
    more = max(0, group.largest - 2) if sends_to_all else 0
    is_scaled = channels != 1 or more > 0
    size = Figure(channels * (base + more * _PEER), "f" if is_scaled else "t")
    if group.domains > 1 and base != _NEXT_SHARED:
        size += Figure(_NETWORK, "t")
    if policy.uses_one_shot and can_add(group):
        size += Figure(_ffi.one_shot_bytes(group.size), "f")
    return size


def _on_host(key, groups, devices) -> Figure:
    record = _ffi.flight_record_bytes(devices.size, devices.per_process)
    if key.backend == "host" and any(each.processes > 1 for each in groups):
        # All communicators between the same processes share one piece.
        return Figure(record + _ffi.shared_memory_bytes(devices.processes), "f")
    return Figure(record, "f")
