"""What it takes to begin: messages to the store, and the making of communicators.

Processes meet through the key-value store of ``jax.distributed``: see
``communicator/rounds.py``. A round costs a process three writes. Then it looks at what
all have written, and waits for one of those that are missing, at random: in whatever
order they come, each wait halves what is missing, on average.
"""

import dataclasses
import math
from collections.abc import Sequence

from jaxcomm.machine import Machine
from jaxcomm.planning.communicators import PlannedCommunicator
from jaxcomm.planning.figure import NOTHING, Figure
from jaxcomm.planning.groups import Devices

_WRITES = 3
# Of what a process publishes in a round.
_CARD_BYTES = 450
# What NCCL computes of every pair of ranks: ncclBuildRing 26 s at 98,304 ranks and
# initTransportsRank 11 s at 49,152 (NCCL PR 1789).
_PAIR_SECONDS = 26 / 98304**2 + 11 / 49152**2


@dataclasses.dataclass(frozen=True)
class Startup:
    """What it takes to begin.

    Attributes:
      processes: how many meet.
      rounds: how often they meet.
      messages: that a process sends to the store, at most on average.
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
    rounds = _rounds(communicators) if processes > 1 else 0
    looks = 1 + math.log2(processes) if processes > 1 else 0
    # A wait before every look but the first.
    messages = Figure(rounds * (_WRITES + 2 * looks - 1), "f") if rounds else NOTHING
    store_bytes = Figure(rounds * looks * processes**2 * _CARD_BYTES, "f")
    seconds = messages.value * machine.store_seconds
    seconds += sum(
        each.size * machine.create_seconds
        + (_PAIR_SECONDS * each.size**2 if each.key.backend == "nccl" else 0)
        for each in communicators
    )
    if any(each.key.backend == "nccl" for each in communicators):
        seconds += _PAIR_SECONDS * devices.size**2  # the mesh's own
    return Startup(processes, rounds, messages, store_bytes, Figure(seconds, "f"))


def _rounds(communicators):
    of_nccl = sum(each.key.backend == "nccl" for each in communicators)
    of_host = any(
        each.key.backend == "host" and any(g.processes > 1 for g in each.groups)
        for each in communicators
    )
    # Whether NCCL serves all; then one for each. Who shares memory: once.
    return (of_nccl + 1 if of_nccl else 0) + of_host
