"""What it takes to begin: messages to the store, and the making of communicators.

Processes meet through the key-value store of ``jax.distributed``: see
``communicator/phase.py``. Values go up a tree of blocks. A leader looks at what its
block has written, and waits for one of those that are missing, at random: in whatever
order they come, each wait halves what is missing, on average.
"""

import dataclasses
import math
from collections.abc import Sequence

from jaxcomm.communicator import tree
from jaxcomm.machine import Machine
from jaxcomm.planning.communicators import PlannedCommunicator
from jaxcomm.planning.figure import NOTHING, Figure
from jaxcomm.planning.groups import Devices

# Of a round: where a process is, and what came of it.
_MESSAGES = 2
# Of what a process writes for its leader, of what comes back to all, and of what a
# process writes once for those of its host.
_BUNDLE_BYTES, _VERDICT_BYTES, _INFO_BYTES = 300, 300, 250
# Of the result, where processes find out who shares a host.
_HOST_BYTES = 50
# What NCCL computes of every pair of ranks: ncclBuildRing 26 s at 98,304 ranks and
# initTransportsRank 11 s at 49,152 (NCCL PR 1789).
_PAIR_SECONDS = 26 / 98304**2 + 11 / 49152**2


@dataclasses.dataclass(frozen=True)
class Startup:
    """What it takes to begin.

    Attributes:
      processes: how many meet.
      rounds: how often they meet.
      messages: that the root of the tree sends to the store, at most on average. Most
        processes send three a round.
      store_bytes: that the store sends to all processes together.
      seconds: until the communicators are there. Without the connections that NCCL
        makes at the first use, and without CUDA's own start.
    """

    processes: int
    rounds: int
    messages: Figure
    store_bytes: Figure
    seconds: Figure


def startup(
    communicators: Sequence[PlannedCommunicator],
    devices: Devices,
    machine: Machine,
) -> Startup:
    """Return what it takes to make communicators."""
    processes = devices.processes
    of_nccl, of_host = _rounds(communicators) if processes > 1 else (0, 0)
    rounds = of_nccl + of_host
    messages = rounds * messages_of_round(processes)
    store_bytes = Figure(_store_bytes(processes, rounds, of_host, devices), "f")
    messages = Figure(messages, "f") if rounds else NOTHING
    seconds = messages.value * machine.store_seconds
    seconds += sum(
        each.size * machine.create_seconds
        + (_PAIR_SECONDS * each.size**2 if each.key.backend == "nccl" else 0)
        for each in communicators
    )
    if any(each.key.backend == "nccl" for each in communicators):
        seconds += _PAIR_SECONDS * devices.size**2  # the mesh's own
    return Startup(processes, rounds, messages, store_bytes, Figure(seconds, "f"))


def messages_of_round(processes: int) -> float:
    """Return how many messages the root sends in a round, at most on average."""
    # A write and the looks, with a wait in between, in each block that the root leads.
    return _MESSAGES + sum(2 * each for each in _looks(processes))


def _looks(processes: int) -> list[float]:
    """Return how often the root looks at each block that it leads."""
    blocks = (tree.members(0, each, processes) for each in tree.strides(processes))
    return [1 + math.log2(len(block)) for block in blocks]


def _store_bytes(processes: int, rounds: int, of_host: int, devices: Devices) -> float:
    if not rounds:
        return 0
    lowest, *higher = _looks(processes)
    # Of the blocks above, there is one for each block of the lowest.
    looks = lowest + sum(higher) / tree.FAN_IN
    of_a_host = -(-processes // devices.hosts) * _INFO_BYTES
    hosts = of_host * devices.hosts * _HOST_BYTES
    of_a_round = looks * _BUNDLE_BYTES + _VERDICT_BYTES
    return processes * (rounds * of_a_round + of_a_host + hosts)


def _rounds(communicators: Sequence[PlannedCommunicator]) -> tuple[int, int]:
    """Return how often processes meet for NCCL and for the host backend."""
    of_nccl = sum(each.key.backend == "nccl" for each in communicators)
    of_host = any(
        each.key.backend == "host" and any(g.processes > 1 for g in each.groups)
        for each in communicators
    )
    # Whether NCCL serves all; then one for each. Who shares memory: once.
    return (of_nccl + 1 if of_nccl else 0), int(of_host)
