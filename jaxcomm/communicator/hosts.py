"""Where processes run, and which of them have ended."""

import dataclasses
import os
from collections.abc import Iterable

from jaxcomm import config
from jaxcomm._built import _ffi
from jaxcomm.communicator.store import of_job

# (process id, start time, process, thread) of a process whose end this one can see.
Peer = tuple[int, int, int, int]


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


def told_ends() -> dict[int, int]:
    """Return the processes of which the launcher says that they ended, and statuses."""
    path = config.ended_file()
    if path is None:
        return {}
    try:
        with open(path) as file:
            lines = file.read().split("\n")[:-1]
    except OSError:
        return {}  # The job is over.
    return {int(process): int(status) for process, status in map(str.split, lines)}


def infos(processes: tuple[int, ...]) -> dict[int, Info]:
    """Return the infos of those of the processes that run on this host."""
    found = of_job(processes).entries(folder(), processes)
    return {process: Info(*fields) for process, fields in found.items()}


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
