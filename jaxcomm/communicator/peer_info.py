"""What a process tells the others about itself."""

import dataclasses
import os

from jaxcomm import _ffi


@dataclasses.dataclass(frozen=True)
class PeerInfo:
    """Where a process runs, and how others notice its end.

    Attributes:
      boot: names the running system. Containers of one host share it.
      pid: process id.
      start: when the process started, to tell it from a later one of the same id.
      pid_namespace: namespace of the id, None where ``/proc`` hides it.
      thread: a thread that ends as soon as its process begins to end.
    """

    boot: str
    pid: int
    start: int
    pid_namespace: str | None
    thread: int

    def is_visible_from(self, own: "PeerInfo") -> bool:
        """Return whether ``pid`` means this process in the other's namespace, too.

        Containers of one host may share memory and yet number their processes apart.
        There the id belongs to another process or to none, and the process would be
        taken for dead.
        """
        if self.pid_namespace and own.pid_namespace:
            return self.pid_namespace == own.pid_namespace
        return 0 != _ffi.process_start_time(self.pid) == self.start


def of_this_process() -> PeerInfo:
    """Return the info that this process publishes."""
    pid = os.getpid()
    return PeerInfo(
        boot=_boot_id(),
        pid=pid,
        start=_ffi.process_start_time(pid),
        pid_namespace=_pid_namespace(),
        thread=_ffi.sentinel_thread(),
    )


def visible_peers(
    infos: dict[int, PeerInfo], me: int
) -> list[tuple[int, int, int, int]]:
    """Return (pid, start, process, thread) of the peers whose end ``me`` can see."""
    own = infos[me]
    return [
        (info.pid, info.start, process, info.thread)
        for process, info in infos.items()
        if process != me and info.boot == own.boot and info.is_visible_from(own)
    ]


def _pid_namespace() -> str | None:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
