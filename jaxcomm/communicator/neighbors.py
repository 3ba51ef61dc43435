"""Which processes share a host, and the memory that they share."""

import dataclasses
from collections.abc import Iterable

from jaxcomm import _ffi
from jaxcomm.communicator import peer_info, rendezvous
from jaxcomm.communicator.peer_info import PeerInfo
from jaxcomm.communicator.rounds import Round


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
    process_set: _ffi.ProcessSet | None
    segment: _ffi.Segment | None

    def refusal(self, processes: Iterable[int]) -> str | None:
        """Return why these processes cannot share memory, None if they can."""
        hosts = {self.host_of[process] for process in processes}
        if len(hosts) > 1:
            return f"processes {sorted(processes)} are on {len(hosts)} hosts"
        return self.refusals.get(hosts.pop())


_known: dict[tuple[int, ...], Neighbors] = {}


def find(processes: tuple[int, ...], self_index: int) -> Neighbors:
    """Find the neighbors in a set of processes, once; each of them must call this.

    Args:
      processes: as for :func:`rendezvous.meet`.
      self_index: as for :func:`rendezvous.meet`.

    Raises:
      CommunicatorError: if some did not come in time, or run another version of this
        package.
    """
    if processes not in _known:
        _known[processes] = rendezvous.agree(
            processes,
            self_index,
            rendezvous.Purpose("find out who shares memory"),
            lambda current: _find(current, processes, self_index),
        )
    return _known[processes]


def forget() -> None:
    """Let go of all shared memory; the next :func:`find` makes it anew."""
    _known.clear()


def _find(current: Round, processes: tuple[int, ...], me: int) -> Neighbors:
    found = current.collect(peer_info.of_this_process().boot)
    first: dict[str, int] = {}
    host_of = {p: first.setdefault(boot, p) for p, boot in found.items()}
    members = tuple(p for p in processes if host_of[p] == host_of[me])
    # Anonymous memory first. Where a sandbox hides /proc/<pid>/fd, a file in /dev/shm.
    segment, refusals = None, dict.fromkeys(host_of.values(), "")
    for attempt in ("memfd", "dev-shm"):
        refusal = None
        if len(members) > 1 and host_of[me] in refusals:
            segment, refusal = _share(current, attempt, members, me)
        try:
            answers = current.collect(refusal)
        finally:
            if segment is not None:
                segment.forget()
        refusals = {host_of[p]: text for p, text in answers.items() if text}
        if host_of[me] in refusals:
            segment = None
        if not refusals:
            break
    process_set = None
    if segment is not None:
        infos = current.infos_of_host()
        peers = [_watched(p, infos[p], infos[me]) for p in members]
        process_set = _ffi.process_set(segment, peers, members.index(me))
    return Neighbors(host_of, refusals, members, process_set, segment)


def _watched(process: int, info: PeerInfo, own: PeerInfo) -> tuple[int, int, int]:
    # The id 0 means that nobody watches the process.
    return info.pid if info.is_visible_from(own) else 0, info.start, process


def _share(
    current: Round, attempt: str, members: tuple[int, ...], me: int
) -> tuple[_ffi.Segment | None, str | None]:
    """Make the host's segment or attach to it.

    Returns:
      The segment, or None and why not.
    """
    leader = members[0]
    if me == leader:
        return _create(current, attempt, members, me)
    found = current.fetch(f"segment-{attempt}", leader)
    if "error" in found:
        return None, found["error"]
    path, size, nonce = found["address"]
    try:
        return _ffi.attach_segment(path, size, nonce, len(members)), None
    except RuntimeError as error:
        return None, f"process {me}: {error}"


def _create(current, attempt, members, me):
    try:
        segment = _ffi.create_segment(len(members), attempt == "dev-shm")
    except RuntimeError as error:
        refusal = f"process {me}: {error}"
        current.put(f"segment-{attempt}", {"error": refusal})
        return None, refusal
    current.put(f"segment-{attempt}", {"address": segment.address()})
    return segment, None
