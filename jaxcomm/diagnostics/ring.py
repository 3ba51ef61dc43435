"""What XLA's own collectives do: files that ``ffi/watch`` writes for NCCL.

Each process keeps the last operations of each communicator of NCCL in a file, which
outlives it.
"""

import dataclasses
import os
import struct

from jaxcomm import own_file
from jaxcomm.communicator import text_table as table
from jaxcomm.diagnostics.record import MOST_PROCESSES, RecordError

SUFFIX = ".ring"
PATTERN = "nccl-*.ring"
# As ffi/watch/ring.h has it.
_MAGIC = 0x32304C434E58414A
_HEAD = struct.Struct("<QiiiiqII")
_OPERATION = struct.Struct("<QqqQQHHi8s8s")
# All of an operation but when it ended and how many channels began and ended.
_WRITTEN_ONCE = (0, 16), (24, 32), (36, 64)
_HEAD_BYTES = 4096
BLOCKS = 64
_OPERATIONS = 256
_BLOCK_BYTES = 128 + _OPERATION.size * _OPERATIONS
BYTES = _HEAD_BYTES + BLOCKS * _BLOCK_BYTES
_MOST_RANKS = 1 << 16
_BYTES_OF = {"8": 1, "16": 2, "32": 4, "64": 8, "4": 1, "5": 1}


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

    @property
    def bytes(self) -> int:
        """Of its elements; as many as these if the dtype is unknown."""
        digits = "".join(filter(str.isdigit, self.dtype.partition("e")[0]))
        return self.count * _BYTES_OF.get(digits, 1)


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
      later: what it held after that. Of operations that were written meanwhile, one
        part may be old and another new. If None, nobody wrote.

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
    found = (_block(content, later, i) for i in range(BLOCKS))
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
        _operation(content, at, place, count, lost)
        for place in range(_OPERATIONS)
        if _is_whole(content, later, at := first + place * _OPERATION.size)
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


def _is_whole(content, later, at):
    """Say whether an operation was not written while it was read.

    Memory that is copied may be read in any order: its number may be new, and the rest
    old. At the second time it is not.
    """
    return all(
        content[at + start : at + end] == later[at + start : at + end]
        for start, end in _WRITTEN_ONCE
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
