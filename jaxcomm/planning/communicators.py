"""The communicators of a mesh, and what each takes of a rank, by published figures."""

import dataclasses

from jaxcomm.communicator import backends
from jaxcomm.communicator.lane import DEFAULT_LANE
from jaxcomm.communicator.policy import CommPolicy
from jaxcomm.communicator.replica_groups import IndexGroups
from jaxcomm.machine import Machine
from jaxcomm.planning.extension_sizes import (
    MOST_SHARING_PROCESSES,
    inbox_bytes,
    shared_memory_bytes,
)
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
        if backend == "nccl" and policy.source == "own":
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
    return size
