"""How many communicators there were, and the memory that they hold."""

import dataclasses

from jaxcomm.communicator import cache
from jaxcomm.communicator.communicator import Communicator


@dataclasses.dataclass(frozen=True)
class Counters:
    """How many communicators this process made and ended.

    Attributes:
      created: made from nothing. NCCL makes only those of whole meshes so.
      split: split off those of whole meshes. ``CommPolicy(share=)`` says whether they
        have resources of their own.
      borrowed: XLA's, for the ``xla`` backend.
      destroyed: closed.
      live: there now.

    Example:
      >>> jaxcomm.Counters(created=1, split=2, live=2)
      Counters(created=1, split=2, borrowed=0, destroyed=0, live=2)
    """

    created: int = 0
    split: int = 0
    borrowed: int = 0
    destroyed: int = 0
    live: int = 0


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """The memory of one communicator, in bytes.

    Attributes:
      communicator: whose.
      device_bytes: on accelerators of this process. NCCL from 2.29.7 on reports it for
        communicators with resources of their own; otherwise the drop in free memory
        while it was created, which excludes buffers for peers connected later.
      parent_bytes: of the mesh's communicator that it was split off, on the same
        devices. Shared: the same bytes are reported for every child.
      host_bytes: of ordinary memory.
      shared_bytes: of shared memory.
      pinned_bytes: of the page-locked memory in which NCCL queues work, for each rank
        of this process: ``NCCL_WORK_FIFO_BYTES``, 1 MiB unless set. NCCL reports none,
        and pins a little more.
      symmetric_bytes: of every :class:`SymmetricPool` that is registered with it, on
        the devices of this process. Shared: reported for every such communicator.
      shared: whether another communicator's resources serve it.

    Example:
      >>> (member,) = jaxcomm.init(mesh, "context")
      >>> jaxcomm.memory_report()[0].communicator is member
      True
    """

    communicator: Communicator
    device_bytes: int = 0
    parent_bytes: int = 0
    host_bytes: int = 0
    shared_bytes: int = 0
    pinned_bytes: int = 0
    symmetric_bytes: int = 0
    shared: bool = False


def counters() -> Counters:
    """Return how many communicators this process made and ended.

    Returns:
      A :class:`Counters`, which compares with ``==``.

    Example:
      >>> made = jaxcomm.init(mesh, "context")
      >>> before = jaxcomm.counters()
      >>> made = jaxcomm.init(mesh, "context")
      >>> jaxcomm.counters() == before
      True
    """
    return Counters(**cache.counts())


def memory_report() -> list[MemoryRow]:
    """Return the memory each live communicator holds, oldest first.

    The ``host`` backend moves bytes straight from operand to result within a process
    and holds a few hundred bytes a rank. All communicators between the same processes
    share one piece of shared memory, reported for each of them. XLA does not report
    the memory of the ``xla`` backend: its rows are 0.

    Returns:
      A list of :class:`MemoryRow`, in bytes.

    Example:
      >>> made = jaxcomm.init(mesh, "context")
      >>> [row.host_bytes > 0 for row in jaxcomm.memory_report()]
      [True]
    """
    live = cache.communicators()
    connections = [member.connection for member in live]
    rows = []
    for member in live:
        stats = member.stats()
        held = member.spec.backend.memory(member.spec, member.connection, connections)
        rows.append(
            MemoryRow(
                member,
                device_bytes=stats["device_bytes"],
                host_bytes=stats["host_bytes"],
                **held,
            )
        )
    return rows
