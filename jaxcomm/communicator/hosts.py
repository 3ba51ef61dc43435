"""Where processes run, and which of them have ended."""

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from jaxcomm import config, own_file
from jaxcomm._built import _ffi
from jaxcomm.communicator.store import not_ours, of_job

# (process id, start time, process, thread) of a process whose end this one can see.
Peer = tuple[int, int, int, int]
# What the launcher writes for a process that has ended: its number and status.
_END = re.compile(rb"([0-9]{1,7}) ([0-9]{1,3})\n")
# All the processes that a launcher may have.
_MOST_ENDS_BYTES = (256 * 4096) * 12
# How often processes had been started again when they were taken in: each of their
# earlier starts has an end of its own.
_starts: dict[int, int] = {}


@dataclasses.dataclass(frozen=True)
class Info:
    """Where a process runs, and how others notice its end.

    Attributes:
      pid: process id.
      start: when the process started, to tell it from a later one of the same id.
      pid_namespace: namespace of the id, None where ``/proc`` hides it.
      thread: a thread that ends as soon as its process begins to end.
    """

    pid: int
    start: int
    pid_namespace: str | None
    thread: int

    def is_visible_from(self, own: "Info") -> bool:
        """Return whether ``pid`` means this process in the other's namespace, too.

        Containers of one host may share memory and yet number their processes apart.
        There the id belongs to another process or to none, and the process would be
        taken for dead.
        """
        if self.pid_namespace and own.pid_namespace:
            return self.pid_namespace == own.pid_namespace
        return 0 != _ffi.process_start_time(self.pid) == self.start


def publish(processes: tuple[int, ...], me: int) -> None:
    """Say where this process runs; its neighbors read it after a rendezvous."""
    pid = os.getpid()
    info = Info(
        pid, _ffi.process_start_time(pid), _pid_namespace(), _ffi.sentinel_thread()
    )
    of_job(processes).set(f"{folder()}/{me}", dataclasses.astuple(info), me)


def peers(processes: tuple[int, ...], me: int) -> list[Peer]:
    """Return the other processes whose end this one can see.

    They run on this host, in the same namespace of process ids. Each of the processes
    must have published, and met the others since.
    """
    found = infos(processes)
    own = found.pop(me)
    return [
        (info.pid, info.start, process, info.thread)
        for process, info in found.items()
        if info.is_visible_from(own)
    ]


def ended(processes: Iterable[int], me: int) -> set[int]:
    """Return those of some processes that have certainly ended.

    The launcher must have told that, see ``JAXCOMM_ENDED``; or this process must see
    it: they ran on this host, and have published where.
    """
    processes = tuple(processes)
    namespace = _pid_namespace()
    return told_ends().keys() & {*processes} | {
        process
        for process, info in infos(processes).items()
        if process != me
        and namespace is not None
        and info.pid_namespace == namespace
        and _ffi.has_ended(info.pid, info.start, info.thread)
    }


def take_in(starts: dict[int, int]) -> None:
    """Take processes for living that ended so often before they were started again."""
    _starts.update(starts)


def starts() -> dict[int, int]:
    """Return how often processes were started again that were taken in."""
    return dict(_starts)


def told_ends(starts: Mapping[int, int] | None = None) -> dict[int, int]:
    """Return the processes of which the launcher says that they ended, and statuses.

    Args:
      starts: how often processes were started again. If None, those taken in.
    """
    path = config.ended_file()
    if path is None:
        return {}
    try:
        content = own_file.read(path, _MOST_ENDS_BYTES)
    except (OSError, ValueError):
        return {}  # The job is over, or the variable names no such file.
    return ends_in(content, _starts if starts is None else starts)


def ends_in(content: bytes, starts: Mapping[int, int] | None = None) -> dict[int, int]:
    r"""Return the processes and statuses that a file of the launcher names.

    A line that is not whole, or of another form, says nothing. Nor do the first lines
    of a process that was started again so often.

    >>> ends_in(b"1 137\n2 0\n4 13")
    {1: 137, 2: 0}
    >>> ends_in(b"1 137\n2 0\n2 9\n", {1: 1, 2: 1})
    {2: 9}
    """
    seen: Counter[int] = Counter()
    ends = {}
    for form in map(_END.fullmatch, content.splitlines(keepends=True)):
        if form is not None:
            process = int(form[1])
            seen[process] += 1
            if seen[process] > (starts or {}).get(process, 0):
                ends[process] = int(form[2])
    return ends


def infos(processes: tuple[int, ...]) -> dict[int, Info]:
    """Return the infos of those of the processes that run on this host.

    Raises:
      EntryError: an entry is none that jaxcomm writes.
    """
    found = of_job(processes).entries(folder(), processes)
    return {process: info_of(process, fields) for process, fields in found.items()}


def info_of(process: int, fields: object) -> Info:
    """Return what :func:`publish` wrote.

    Raises:
      EntryError: it is none that jaxcomm writes.
    """
    match fields:
        case [int(pid), int(start), str() | None as namespace, int(thread)]:
            ids = 0 < pid < 2**31 and 0 <= thread < 2**31
            if ids and 0 <= start < 2**63:
                return Info(pid, start, namespace, thread)
    raise not_ours(f"{folder()}/{process}", fields)


def folder() -> str:
    """Return the store's folder of this host. Containers of one host share it."""
    return f"jaxcomm/hosts/{_boot_id()}"


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _pid_namespace() -> str | None:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
