"""What :func:`jaxcomm.counters` and :func:`jaxcomm.memory_report` tell."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxcomm.communicator.backends import BACKENDS

if TYPE_CHECKING:
    from jaxcomm.communicator.communicator import Communicator


@dataclasses.dataclass(frozen=True)
class Counters:
    """How many communicators this process made and ended.

    Attributes:
      created: made from nothing. For NCCL, those of whole meshes, which the others are
        split off.
      split: split off those, with resources of theirs or their own:
        ``CommPolicy(share=)``.
      borrowed: XLA's, for the ``xla`` backend or ``CommPolicy(source="xla")``.
      evicted: closed to make room: none, since at ``JAXCOMM_MAX_COMMUNICATORS``
        another one is an error.
      destroyed: closed.
      live: there now.

    Example:
      >>> jaxcomm.counters()  # doctest: +SKIP
      Counters(created=1, split=2, borrowed=0, evicted=0, destroyed=0, live=2)
    """

    created: int = 0
    split: int = 0
    borrowed: int = 0
    evicted: int = 0
    destroyed: int = 0
    live: int = 0


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """The memory of one communicator, in bytes.

    Attributes:
      communicator: whose.
      device_bytes: on accelerators of this process, as NCCL tells it now (2.29.7 and
        newer, resources of its own), else what its making took: what was free before
        less what was free afterwards. NCCL connects to other peers than the next one
        when they are first sent to, which is not in that.
      parent_bytes: of the mesh's communicator that it was split off, on the same
        devices; told on the row of each of its children.
      host_bytes: of ordinary memory.
      shared_bytes: of shared memory.
      pinned_bytes: of the page-locked memory in which NCCL queues work, for each rank
        of this process: ``NCCL_WORK_FIFO_BYTES``, 1 MiB unless set. NCCL tells of none,
        and pins a little more.
      symmetric_bytes: of every :class:`SymmetricPool` that is registered with it, on
        the devices of this process; told on the row of each such communicator.
      shared: whether another communicator's resources serve it.

    Example:
      >>> [row.device_bytes for row in jaxcomm.memory_report()]  # doctest: +SKIP
      [4194304, 226492416]
    """

    communicator: "Communicator"
    device_bytes: int = 0
    parent_bytes: int = 0
    host_bytes: int = 0
    shared_bytes: int = 0
    pinned_bytes: int = 0
    symmetric_bytes: int = 0
    shared: bool = False


def memory_row(member: "Communicator", live: "Sequence[Communicator]") -> MemoryRow:
    """Returns what a communicator holds, ``live`` being all that there are."""
    stats = member.stats()
    return MemoryRow(
        communicator=member,
        device_bytes=stats["device_bytes"],
        host_bytes=stats["host_bytes"],
        **BACKENDS[member.backend].memory(member, live),
    )
