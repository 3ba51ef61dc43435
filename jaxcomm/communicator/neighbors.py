"""Which processes share a host, and the memory that they share."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from jaxcomm._built import _ffi
from jaxcomm.communicator import hosts, rendezvous


@dataclasses.dataclass(frozen=True)
class Neighbors:
    """What a set of processes found out about each other.

    Attributes:
      host_of: the lowest process on the same host, by process index.
      refusals: why the processes of a host share no memory, by its lowest process.
      members: the processes of this host, in order.
      process_set: their shared memory; None if this process is alone on its host or
        there is a refusal.
      segment: the same, to ask for its size.
    """

    host_of: dict[int, int]
    refusals: dict[int, str]
    members: tuple[int, ...]
    process_set: "_ffi.ProcessSet | None"
    segment: "_ffi.Segment | None"

    def refusal(self, processes: Iterable[int]) -> str | None:
        """Return why these processes cannot share memory, None if they can."""
        hosts = {self.host_of[process] for process in processes}
        if len(hosts) > 1:
            return f"processes {sorted(processes)} are on {len(hosts)} hosts"
        return self.refusals.get(hosts.pop())


_known: dict[tuple[int, ...], Neighbors] = {}


def find(processes: tuple[int, ...], me: int) -> Neighbors:
    """Find the neighbors in a set of processes, once; each of them must call this.

    Arguments and errors are those of :func:`rendezvous.meet`.
    """
    if processes not in _known:
        hosts.publish(processes, me)
        _known[processes] = rendezvous.agree(
            processes,
            me,
            "find out who shares memory",
            lambda collect: _find(collect, processes, me),
        )
    return _known[processes]


def forget(is_over: Callable[[tuple[int, ...]], bool]) -> None:
    """Let go of memory of sets of processes; the next :func:`find` makes it anew."""
    for processes in [each for each in _known if is_over(each)]:
        del _known[processes]


def _find(
    collect: Callable[[Any], dict[int, Any]], processes: tuple[int, ...], me: int
) -> Neighbors:
    first: dict[str, int] = {}
    host_of = {
        p: first.setdefault(host, p) for p, host in collect(hosts.folder()).items()
    }
    leader = host_of[me]
    members = tuple(p for p in processes if host_of[p] == leader)
    # Anonymous memory first. Where a sandbox hides /proc/<pid>/fd, a file in /dev/shm.
    segment, refusals = None, dict.fromkeys(host_of.values(), "")
    for named in (False, True):
        # For each host: its leader makes the memory, and the others attach to it.
        shares = len(members) > 1 and leader in refusals
        refusal = None
        try:
            if shares and me == leader:
                segment, refusal = _try(me, _ffi.create_segment, len(members), named)
            mine = [segment.address() if shares and segment else None, refusal]
            address, refused = collect(mine)[leader]
            if shares and me != leader:
                refusal = refused
                if address is not None:
                    size = len(members)
                    segment, refusal = _try(me, _ffi.attach_segment, *address, size)
            answers = collect(refusal)
        finally:
            if segment is not None:
                segment.forget()
        refusals = {host_of[p]: text for p, text in answers.items() if text}
        if leader in refusals:
            segment = None
        if not refusals:
            break
    process_set = None
    if segment is not None:
        infos = hosts.infos(members)
        # The id 0 means that nobody watches the process.
        watched = [
            (info.pid if info.is_visible_from(infos[me]) else 0, info.start, process)
            for process, info in infos.items()
        ]
        process_set = _ffi.process_set(segment, watched, members.index(me))
    return Neighbors(host_of, refusals, members, process_set, segment)


def _try(me: int, make: Callable[..., Any], *args: Any) -> tuple[Any, str | None]:
    """Return a segment, or None and why there is none."""
    try:
        return make(*args), None
    except RuntimeError as error:
        return None, f"process {me}: {error}"
