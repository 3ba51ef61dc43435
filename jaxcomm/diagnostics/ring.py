"""What XLA's own collectives do: files that ``ffi/watch`` writes for NCCL.

Each process keeps the last operations of each communicator of NCCL in a file, which
outlives it. Several files together become flight records. NCCL knows no global device
ids, so ranks get ids that are theirs in these records alone.
"""

import dataclasses
import os
import struct
from collections.abc import Mapping, Sequence

from jaxcomm import own_file
from jaxcomm.communicator import text_table as table
from jaxcomm.diagnostics.record import (
    COMPLETED,
    MOST_PROCESSES,
    STARTED,
    CommunicatorRecord,
    Entry,
    ProcessRecord,
    RecordError,
    numbered,
)

SUFFIX = ".ring"
PATTERN = "nccl-*.ring"
# As ffi/watch/ring.h has it.
_MAGIC = 0x32304C434E58414A
_HEAD = struct.Struct("<QiiiiqII")
_BLOCK = struct.Struct("<QiiII40sQII")
_BLOCK_OFFSETS = (0, 64)
_OPERATION = struct.Struct("<QqqQQHHi8s8s")
_HEAD_BYTES = 4096
_BLOCKS = 64
_OPERATIONS = 256
_BLOCK_BYTES = 128 + _OPERATION.size * _OPERATIONS
BYTES = _HEAD_BYTES + _BLOCKS * _BLOCK_BYTES
_MOST_RANKS = 1 << 16
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
_BYTES_OF = {"8": 1, "16": 2, "32": 4, "64": 8, "4": 1, "5": 1}
# A communicator's id, and a rank.
Place = tuple[int, int]
# What collectives of it are in programs, by their order: see lines.py.
Lines = Mapping[Place, Mapping[int, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One collective, send or receive, as NCCL gave it to the GPU.

    Attributes:
      number: how many-th of its communicator on this rank, from 1.
      order: how many-th collective, or how many-th send or receive.
      is_peer: whether it is a send or a receive.
      collective: ``"allred"``.
      dtype: ``"float32"``.
      count: elements.
      peer: or root.
      enqueued: seconds since 1970.
      ended: seconds since 1970; None if it has not ended, or nobody says so.
      has_begun: whether a GPU's kernel has begun it.
    """

    number: int
    order: int
    is_peer: bool
    collective: str
    dtype: str
    count: int
    peer: int
    enqueued: float
    ended: float | None
    has_begun: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """One communicator of NCCL in one process.

    Attributes:
      id: the same on all its ranks.
      rank: this one.
      ranks: how many there are.
      is_closed: whether it has ended.
      count: operations so far.
      tells: whether NCCL tells what GPUs have begun and ended.
      operations: the last ones, oldest first.
    """

    id: int
    rank: int
    ranks: int
    is_closed: bool
    count: int
    tells: bool
    operations: tuple[Operation, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """What one process tells.

    Attributes:
      process: its index.
      processes: how many there are.
      pid: of the operating system.
      began: seconds since 1970.
      blocks: its communicators.
      progress: differs once anything has happened.
    """

    process: int
    processes: int
    pid: int
    began: float
    blocks: tuple[Block, ...]
    progress: tuple[object, ...]


def load(path: str | os.PathLike) -> Ring:
    """Read a file, which its process may write at the same time.

    Raises:
      RecordError: it cannot be read, or is no such file.
    """
    name = table.plain(os.fspath(path))
    try:
        return parse(own_file.read(path, BYTES), own_file.read(path, BYTES))
    except OSError as error:
        raise RecordError(f"{name}: {error.strerror}") from None
    except RecordError as error:
        raise RecordError(f"{name}: {error}") from None


def parse(content: bytes, later: bytes | None = None) -> Ring:
    """Read what is in a file.

    Args:
      content: of the file.
      later: what it held after that. Of operations that the ring has lost meanwhile,
        one part may be old and another new. If None, nobody wrote.

    Raises:
      RecordError: it is no such file.
    """
    if len(content) != BYTES:
        raise _damaged(f"{len(content)} bytes, not {BYTES}")
    magic, pid, process, processes, _, began, _, _ = _HEAD.unpack_from(content)
    if magic != _MAGIC:
        raise RecordError("not a record of NCCL of this version of jaxcomm")
    if not 0 <= process < processes <= MOST_PROCESSES:
        raise _damaged(f"process {process} of {processes}")
    later = later if later and len(later) == BYTES else content
    found = (_block(content, later, i) for i in range(_BLOCKS))
    blocks = tuple(block for block in found if block is not None)
    progress = tuple((block.id, block.count, block.operations) for block in blocks)
    return Ring(
        process=process,
        processes=processes,
        pid=pid,
        began=began / 1e9,
        blocks=blocks,
        progress=progress,
    )


def _damaged(why):
    return RecordError(f"a damaged record of NCCL: {why}")


def _block(content, later, index):
    start = _HEAD_BYTES + index * _BLOCK_BYTES
    id_, rank, ranks, is_closed, kernels = struct.unpack_from("<QiiII", content, start)
    if not id_ or not 0 <= rank < ranks <= _MOST_RANKS:
        return None
    (count,) = struct.unpack_from("<Q", content, start + 64)
    (now,) = struct.unpack_from("<Q", later, start)
    (after,) = struct.unpack_from("<Q", later, start + 64)
    if now != id_ or after < count:
        return None  # Another communicator has this block.
    lost = after - _OPERATIONS
    first = start + 128
    found = (
        _operation(content, first + place * _OPERATION.size, place, count, lost)
        for place in range(_OPERATIONS)
    )
    operations = sorted(filter(None, found), key=lambda each: each.number)
    return Block(
        id=id_,
        rank=rank,
        ranks=ranks,
        is_closed=bool(is_closed),
        count=count,
        tells=bool(kernels),
        operations=tuple(operations),
    )


def _operation(content, at, place, count, lost):
    """Return an operation; None if it is being written, or its process died so."""
    fields = _OPERATION.unpack_from(content, at)
    number, enqueued, ended_at, elements, state, channels = fields[:6]
    _, peer, collective, dtype = fields[6:]
    order, begun, ended = state >> 32 & 0x7FFFFFFF, state >> 16 & 0xFFFF, state & 0xFFFF
    if not max(lost, 0) < number <= count:
        return None
    if (number - 1) % _OPERATIONS != place or enqueued <= 0:
        return None
    has_ended = 0 < channels <= ended and ended_at > 0
    return Operation(
        number=number,
        order=order,
        is_peer=bool(state >> 63),
        collective=_text(collective),
        dtype=_text(dtype).lower(),
        count=elements,
        peer=peer,
        enqueued=enqueued / 1e9,
        ended=ended_at / 1e9 if has_ended else None,
        has_begun=begun > 0,
    )


def _text(field):
    text = field.partition(b"\0")[0].decode("ascii", "replace")
    return table.plain(text)


def bytes_of(dtype: str) -> int:
    """Return how many bytes an element of ``"float32"`` has; 1 if that is unknown."""
    digits = "".join(filter(str.isdigit, dtype.partition("e")[0]))
    return _BYTES_OF.get(digits, 1)


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
            device = ring.process * _BLOCKS + _place(ring, block)
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
            tells = {block.rank: block.tells for _, block in found}
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
            if not block.tells or not left:
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
        bytes=operation.count * bytes_of(operation.dtype),
        state=COMPLETED if is_done else STARTED,
        started=operation.enqueued,
        seconds=max(ended - operation.enqueued, 0.0) if is_done else None,
        where=where,
    )
