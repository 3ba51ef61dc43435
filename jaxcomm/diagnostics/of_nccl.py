"""What files of NCCL's callbacks tell: flight records, and what GPUs have begun.

NCCL knows no global device ids, so ranks get ids that are theirs in these records
alone.
"""

from collections.abc import Mapping, Sequence

from jaxcomm.diagnostics.record import (
    COMPLETED,
    STARTED,
    CommunicatorRecord,
    Entry,
    ProcessRecord,
    numbered,
)
from jaxcomm.diagnostics.ring import BLOCKS, Block, Ring

# Of a rank that no file tells of.
_UNKNOWN = 1 << 40
_NAMES = {
    "allred": ("all_reduce", "all-reduce"),
    "allgat": ("all_gather", "all-gather"),
    "redsca": ("reduce_scatter", "reduce-scatter"),
    "bcast": ("broadcast", "broadcast"),
    "reduce": ("reduce", "reduce"),
    "alltoal": ("all_to_all", "all-to-all"),
    "Send": ("send", "send"),
    "Recv": ("recv", "receive"),
}
# A communicator's id, and a rank.
Place = tuple[int, int]
# What collectives of it are in programs, by their order: see lines.py.
Lines = Mapping[Place, Mapping[int, str]]


def records(
    rings: Sequence[Ring], host: str, time: float, lines: Lines
) -> tuple[ProcessRecord, ...]:
    """Return the flight records of processes that NCCL's callbacks tell of.

    An operation that a GPU has not begun, while another GPU waits in it, is left out:
    its rank has not come.

    Args:
      rings: one of each process.
      host: name of their machine.
      time: when they were read.
      lines: what operations are in programs.
    """
    devices: dict[tuple[int, int], int] = {}
    members: dict[int, list[tuple[Ring, Block]]] = {}
    for ring in rings:
        for block in ring.blocks:
            device = ring.process * BLOCKS + _place(ring, block)
            devices[block.id, block.rank] = device
            members.setdefault(block.id, []).append((ring, block))
    made: dict[int, list[CommunicatorRecord]] = {ring.process: [] for ring in rings}
    for id_, found in members.items():
        ranks = found[0][1].ranks
        if any(block.ranks != ranks for _, block in found):
            continue
        groups = (tuple(devices.get((id_, r), _UNKNOWN + r) for r in range(ranks)),)
        for is_peer in (False, True):
            of_rank = {
                block.rank: [o for o in block.operations if o.is_peer == is_peer]
                for _, block in found
            }
            if not any(of_rank.values()):
                continue
            tells = {
                block.rank: block.tells if is_peer else _tells_of_collectives(block)
                for _, block in found
            }
            of_id = {rank: lines.get((id_, rank), {}) for rank in of_rank}
            entries = _entries(of_rank, tells, groups[0], {} if is_peer else of_id)
            for ring, block in found:
                made[ring.process].append(
                    CommunicatorRecord(
                        key=f"{(id_ ^ is_peer) & (1 << 64) - 1:016x}",
                        axes="of XLA",
                        lane=f"nccl {id_:016x}"
                        + (" sends and receives" if is_peer else ""),
                        backend="nccl",
                        groups=groups,
                        timeout_seconds=0.0,
                        entries=entries[block.rank],
                        platform="nccl",
                        closed=block.is_closed,
                    )
                )
    return tuple(
        ProcessRecord(
            process=ring.process,
            processes=ring.processes,
            pid=ring.pid,
            host=host,
            time=time,
            reason="nccl",
            communicators=tuple(made[ring.process]),
            began=ring.began,
        )
        for ring in rings
    )


def notes(rings: Sequence[Ring], lines: Lines) -> list[str]:
    """Say what GPUs have begun of what is enqueued, as far as NCCL tells.

    Args:
      rings: one of each process.
      lines: what operations are in programs.
    """
    found = []
    for ring in rings:
        for block in ring.blocks:
            done = {o.order for o in block.operations if o.has_begun and not o.is_peer}
            left = [
                operation
                for operation in block.operations
                if operation.ended is None
                and not operation.is_peer
                and operation.order >= max(done, default=0)
            ]
            if not left or not _tells_of_collectives(block):
                continue
            first = left[0]
            _, name = _NAMES.get(first.collective, (first.collective,) * 2)
            how = (
                "has begun and not ended"
                if first.has_begun
                else "has not begun, though it is enqueued"
            )
            where = lines.get((block.id, block.rank), {}).get(first.order, "")
            what = numbered(name, first.order, where)
            found.append(f"process {ring.process}: {what}, which its GPU {how}")
    return found


def untold(rings: Sequence[Ring]) -> str:
    """Say what all ranks have come to, while nothing tells whether GPUs end it.

    It may have ended long ago, so this is no sign of a hang by itself. Empty if there
    is none.

    Args:
      rings: one of each process.
    """
    members: dict[int, list[Block]] = {}
    for ring in rings:
        for block in ring.blocks:
            members.setdefault(block.id, []).append(block)
    found = []
    for blocks in members.values():
        if len(blocks) < 2 or any(map(_tells_of_collectives, blocks)):
            continue
        lasts = [[o for o in each.operations if not o.is_peer][-1:] for each in blocks]
        if all(lasts):
            (last,) = max(lasts, key=lambda each: each[0].order)
            _, name = _NAMES.get(last.collective, (last.collective,) * 2)
            found.append(numbered(name, last.order, ""))
    return ", ".join(found)


def _tells_of_collectives(block):
    """Return whether events of the GPU are of the operations that they are given for.

    NCCL 2.28 counts a GPU's copy to itself on the GPU alone. After an all-to-all of
    sends and receives, it tells of later collectives before they begin.
    """
    return block.tells and not any(
        operation.is_peer or operation.number != operation.order
        for operation in block.operations
    )


def _place(ring, block):
    """Return which GPU of its process a rank has; they come in the order of ranks."""
    ranks = sorted(each.rank for each in ring.blocks if each.id == block.id)
    return ranks.index(block.rank)


def _entries(of_rank, tells, devices, lines):
    last = {rank: ops[-1].order if ops else 0 for rank, ops in of_rank.items()}
    least, most = min(last.values()), max(last.values())
    awaited = {
        operation.order
        for operations in of_rank.values()
        for operation in operations
        if operation.has_begun and operation.ended is None
    }
    found = {}
    for rank, operations in of_rank.items():
        reached = max((o.order for o in operations if o.has_begun), default=0)
        entries = []
        for operation in operations:
            if tells[rank]:
                # A rank runs them one after the other; some tell nothing, such as a
                # copy to itself.
                is_done = operation.ended is not None or operation.order < reached
                if not (is_done or operation.has_begun) and operation.order in awaited:
                    break
            else:
                # Nobody goes on before all have come; the last may still run.
                is_done = operation.order < least or (
                    operation.order == least and least < most
                )
            where = lines.get(rank, {}).get(operation.order, "")
            entries.append(_entry(operation, rank, devices[rank], is_done, where))
        found[rank] = tuple(entries)
    return found


def _entry(operation, rank, device, is_done, where):
    collective, name = _NAMES.get(operation.collective, (operation.collective,) * 2)
    ended = operation.ended if operation.ended is not None else operation.enqueued
    operands = f"{operation.dtype}[{operation.count}]"
    if operation.is_peer:
        # Ranks that meet differ: who sends, to whom, how much.
        collective, name, operands = "send_receive", "send or receive", ""
    return Entry(
        sequence=operation.order,
        rank=rank,
        group=0,
        device=device,
        run_id=0,
        site="",
        collective=collective,
        name=name,
        operands=operands,
        dtype=operation.dtype,
        bytes=operation.bytes,
        state=COMPLETED if is_done else STARTED,
        started=operation.enqueued,
        seconds=max(ended - operation.enqueued, 0.0) if is_done else None,
        where=where,
    )
