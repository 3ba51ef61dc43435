r"""A flight record: the last operations of one process, as the extension writes them.

The file is JSON::

    {"version": 1, "process": 0, "processes": 2, "pid": 4711, "host": "node7",
     "began": 1763639990.0, "time": 1763640000.5, "reason": "timeout",
     "devices": {"cpu": [0, 1]}, "stacks": "Thread 0x7f12 (most recent call first):\n",
     "communicators": [
      {"key": "00c0ffee00c0ffee", "axes": "('data',)", "lane": "default",
       "backend": "host", "platform": "cpu", "groups": [[0, 1, 2048, 2049]],
       "timeout_seconds": 300.0, "closed": false, "entries": [
        {"sequence": 41, "rank": 0, "group": 0, "device": 0, "run_id": 7,
         "site": "000000000000001f", "collective": "all_reduce", "name": "psum",
         "operands": "float32[4]", "dtype": "float32", "bytes": 16,
         "signature": "5bd1e9955bd1e995", "state": "completed",
         "started": 1763639999.5, "seconds": 0.000052}]}]}

Times are in seconds, points in time since 1970; ``seconds`` is null for an operation
that has not ended. Entries are ordered by the time they started.

Anybody may have written a file. So the whole document is checked before it is used:
types, ranges and sizes. Characters that a terminal would act on become escapes.
"""

import dataclasses
import json
import os
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jaxcomm import own_file
from jaxcomm.communicator import text_table as table

VERSION = 1
# 256 communicators with 1,024 entries each take about 110 MB.
MOST_BYTES = 1 << 28
# A table of those that left no record must fit into memory.
MOST_PROCESSES = 1 << 20
_MOST_NUMBER = 1 << 64
_LONGEST_QUOTE = 80
_MOST_LINES = 4096

Filled = TypeVar("Filled")
STARTED = "started"
COMPLETED = "completed"
FAILED = "failed"
_STATES = (STARTED, COMPLETED, FAILED)


class RecordError(ValueError):
    """A file is not a flight record that this version reads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """What one rank did once.

    Attributes:
      sequence: how many-th operation of this rank on this communicator, from 1.
      rank: in its group.
      group: which of the communicator's groups.
      device: global id.
      run_id: of the launch of the program, the same on all ranks; with ``nccl`` on the
        ranks of one process.
      site: the place in the program; the same where ranks are to meet.
      collective: ``"all_reduce"``.
      name: what the user called, ``"psum"``.
      operands: ``"float32[4,8], int32[]"``.
      dtype: of the first operand, empty if there is none.
      bytes: handed in.
      state: ``"started"`` (some rank is missing, or bytes are moving),
        ``"completed"`` or ``"failed"``.
      started: seconds since 1970.
      seconds: until it ended. None if it has not.
      signature: hash of collective, parameters, shapes and dtypes.
      where: in which program and line, if that is known.
    """

    sequence: int
    rank: int
    group: int
    device: int
    run_id: int
    site: str
    collective: str
    name: str
    operands: str
    dtype: str
    bytes: int
    state: str
    started: float
    seconds: float | None
    signature: str = ""
    where: str = ""

    @property
    def operation(self) -> str:
        """The call and its operands, such as ``"psum(float32[4])"``."""
        return f"{self.name}({self.operands})"

    @property
    def numbered(self) -> str:
        """The call and its number, ``"psum #13 (all-reduce.3, train.py:88)"``."""
        return numbered(self.name, self.sequence, self.where)

    @property
    def ended(self) -> float | None:
        """When it ended, in seconds since 1970. None if it has not."""
        return None if self.seconds is None else self.started + self.seconds


def numbered(name: str, sequence: int, where: str) -> str:
    """Name an operation: ``"psum #13 (all-reduce.3, train.py:88)"``."""
    return f"{name} #{sequence}" + (f" ({where})" if where else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommunicatorRecord:
    """The last operations of one communicator on one process.

    Attributes:
      key: what names the communicator, 16 hexadecimal digits.
      axes: the mesh axes it joins, ``"('data',)"``.
      lane: its lane.
      backend: what moves its bytes.
      groups: global device ids of each group, in rank order.
      timeout_seconds: how long a rank waits for the others.
      entries: oldest first.
      platform: of the devices, ``"cpu"``; empty if unknown.
      closed: whether it was closed before the record was written.
    """

    key: str
    axes: str
    lane: str
    backend: str
    groups: tuple[tuple[int, ...], ...]
    timeout_seconds: float
    entries: tuple[Entry, ...]
    platform: str = ""
    closed: bool = False

    @property
    def title(self) -> str:
        """Axes and lane, as error messages name them."""
        return f"axes {self.axes}, lane {self.lane!r}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessRecord:
    """The last operations of one process.

    Attributes:
      process: its index.
      processes: how many there are.
      pid: of the operating system.
      host: name of the machine.
      time: when it was written, in seconds since 1970.
      reason: why: ``"asked"``, ``"signal"``, ``"timeout"``, ``"exit"`` ...
      communicators: oldest first.
      devices: global ids of the process's devices, by platform.
      began: when the process loaded jaxcomm, in seconds since 1970; None if unknown.
      stacks: lines of what its Python threads did, as ``faulthandler`` writes them;
        empty if nobody asked for them.
    """

    process: int
    processes: int
    pid: int
    host: str
    time: float
    reason: str
    communicators: tuple[CommunicatorRecord, ...]
    devices: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    began: float | None = None
    stacks: tuple[str, ...] = ()


def load(path: str | os.PathLike) -> ProcessRecord:
    """Reads a file of this user.

    Raises:
      RecordError: it cannot be read, or is not a flight record.
    """
    return named(path, parse, load_json(path))


def load_json(path: str | os.PathLike) -> Any:
    """Reads JSON in a file of this user.

    Raises:
      RecordError: it cannot be read, or is not JSON.
    """
    return named(path, lambda: decoded(own_file.read(path, MOST_BYTES)))


def named(path: str | os.PathLike, parse: Callable[..., Any], *given: Any) -> Any:
    """Returns what a function returns; its error then names the file."""
    name = table.plain(os.fspath(path))
    try:
        return parse(*given)
    except OSError as error:
        raise RecordError(f"{name}: {error.strerror}") from None
    except RecordError as error:
        raise RecordError(f"{name}: {error}") from None


def decoded(content: bytes) -> Any:
    """Returns what is in a file.

    Raises:
      RecordError: it is not JSON.
    """
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not JSON: {error}") from None


def read(content: bytes) -> ProcessRecord:
    """Reads what is in a file.

    Raises:
      RecordError: it is not a flight record.
    """
    return parse(decoded(content))


def parse(document: Any) -> ProcessRecord:
    """Reads what :func:`json.load` returned; fields of later versions are passed over.

    Raises:
      RecordError: it is not a flight record, or one of another version.
    """
    if not isinstance(document, dict) or "communicators" not in document:
        raise RecordError("not a flight record of jaxcomm")
    check_version(document)
    try:
        devices = _a(dict, document.get("devices", {}), "devices")
        stacks = _text(document.get("stacks", ""), "stacks").splitlines()
        found = fill(
            ProcessRecord,
            document,
            communicators=tuple(map(_communicator, _list(document, "communicators"))),
            devices={
                table.plain(platform): _numbers(ids, "devices")
                for platform, ids in devices.items()
            },
            stacks=tuple(map(table.plain, stacks[:_MOST_LINES])),
        )
    except (KeyError, TypeError, ValueError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise RecordError(f"a damaged flight record: {why}") from None
    if not 0 <= found.process < found.processes <= MOST_PROCESSES:
        raise RecordError(
            f"a damaged flight record: process {found.process} of {found.processes}"
        )
    return found


def check_version(document: Any) -> None:
    """Refuses what another version wrote.

    Raises:
      RecordError: it did.
    """
    if (version := document.get("version")) != VERSION:
        raise RecordError(
            f"a flight record of version {quoted(version)}; this jaxcomm reads "
            f"version {VERSION}"
        )


def _communicator(document):
    _a(dict, document, "a communicator")
    groups = tuple(_numbers(group, "groups") for group in _list(document, "groups"))
    entries = tuple(fill(Entry, entry) for entry in _list(document, "entries"))
    for entry in entries:
        if entry.state not in _STATES:
            raise ValueError(f"state {quoted(entry.state)} is none of {_STATES}")
        if not (
            0 <= entry.group < len(groups)
            and 0 <= entry.rank < len(groups[entry.group])
        ):
            raise ValueError(
                f"rank {entry.rank} of group {entry.group} is not in groups "
                f"{quoted(groups)}"
            )
    return fill(CommunicatorRecord, document, groups=groups, entries=entries)


def fill(kind: type[Filled], document: Any, **known: Any) -> Filled:
    """Returns a dataclass with what a document has of it, checked.

    Raises:
      KeyError: a field without a default is missing.
      TypeError: a field is of another type, or the document is no dictionary.
    """
    _a(dict, document, kind.__name__)
    fields = {}
    for field in dataclasses.fields(kind):  # pyright: ignore[reportArgumentType]
        if field.name in known:
            fields[field.name] = known[field.name]
        elif field.name in document:
            fields[field.name] = _a(field.type, document[field.name], field.name)
        elif field.default is dataclasses.MISSING:
            raise KeyError(field.name)
    return kind(**fields)


def _list(document, name) -> list:
    return _a(list, document[name], name)


def _numbers(values, name) -> tuple[int, ...]:
    return tuple(_a(int, value, name) for value in _a(list, values, name))


def _text(value, name) -> str:
    """Returns a text as it is, of any number of lines."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {quoted(value)}")
    return value


def _a(kind, value, name) -> Any:
    """Returns a value that must be of a type, a text with escapes."""
    if not _is_a(value, kind):
        raise TypeError(f"{name} is {quoted(value)}")
    return table.plain(value) if isinstance(value, str) else value


def _is_a(value, kind):
    if isinstance(kind, types.UnionType):
        return any(_is_a(value, each) for each in typing.get_args(kind))
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        # As far as there are dates; NaN compares false.
        return isinstance(value, int | float) and abs(value) < 1e11
    if kind is int:
        return isinstance(value, int) and abs(value) < _MOST_NUMBER
    return isinstance(value, kind)


def quoted(value: Any) -> str:
    """Returns what a message shows of a value that may be anything."""
    text = table.plain(repr(value))
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}..."
