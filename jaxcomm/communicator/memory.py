"""The memory that communicators hold."""

import dataclasses

from jaxcomm.communicator import cache, text_table
from jaxcomm.communicator.communicator import Communicator


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
      arena_bytes: of the memory that other ranks reach, on the devices of this process.
        ``device_bytes`` counts what this communicator has of it. Shared: reported for
        every child. ``CommPolicy(arena_bytes=)`` bounds it.
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
    arena_bytes: int = 0
    host_bytes: int = 0
    shared_bytes: int = 0
    pinned_bytes: int = 0
    symmetric_bytes: int = 0
    shared: bool = False


_COLUMNS = (
    *("mesh axes", "lane", "devices", "parent", "arena", "host", "shared memory"),
    *("pinned", "symmetric", "shares"),
)


class MemoryReport(list[MemoryRow]):
    """The memory of all communicators: a list of rows, which prints as a table."""

    def _rows(self):
        for row in self:
            held = (
                *(row.device_bytes, row.parent_bytes, row.arena_bytes),
                *(row.host_bytes, row.shared_bytes),
                *(row.pinned_bytes, row.symmetric_bytes),
            )
            axes, lane = " x ".join(row.communicator.axes), row.communicator.lane
            shares = "yes" if row.shared else "no"
            yield axes, lane, *map(text_table.size, held), shares

    def __str__(self) -> str:
        return text_table.text(_COLUMNS, self._rows())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return text_table.as_html(_COLUMNS, self._rows())


def memory_report() -> MemoryReport:
    """Return the memory each live communicator holds, oldest first.

    The ``host`` backend moves bytes straight from operand to result within a process
    and holds a few hundred bytes a rank. All communicators between the same processes
    share one piece of shared memory, reported for each of them. XLA does not report
    the memory of the ``xla`` backend: its rows are 0.

    Returns:
      A list of :class:`~jaxcomm.communicator.memory.MemoryRow`, in bytes. It prints as
      a table.

    Example:
      >>> made = jaxcomm.init(mesh, "context")
      >>> [row.host_bytes > 0 for row in jaxcomm.memory_report()]
      [True]
    """
    live = cache.communicators()
    connections = [member.connection for member in live]
    rows = MemoryReport()
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
