"""How processes agree: who takes part, who shares a host, and where its memory is.

Everything goes through the key-value store of ``jax.distributed``, with a deadline
that names the processes which did not come. What is decided from it (which backend
serves a partition) is decided from what all of them published, and so alike on all.
"""

import dataclasses
import hashlib
import json
import os
import time

from jaxcomm import _ffi, _jax_compat, config
from jaxcomm.errors import CommunicatorError

# Bumped when the layout of the shared memory changes: processes must agree on it.
_LAYOUT = 1
# One blocking look into the store; Ctrl-C is seen in between.
_SLICE_SECONDS = 1.0


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
    process_set: object | None
    segment: object | None

    def refusal(self, processes) -> str | None:
        """Returns why these processes cannot share memory, None if they can."""
        hosts = {self.host_of[process] for process in processes}
        if len(hosts) > 1:
            return f"processes {sorted(processes)} are on {len(hosts)} hosts"
        return self.refusals.get(hosts.pop())


_known: dict[tuple[int, ...], Neighbors] = {}
_meetings: dict[tuple[int, ...], int] = {}


def neighbors(processes: tuple[int, ...], self_index: int) -> Neighbors:
    """Meets the other processes of a set, once; each of them must call this.

    Args:
      processes: JAX's process indices, sorted, this process's among them.
      self_index: this process's.

    Raises:
      CommunicatorError: if some did not come before the deadline, or run another
        version of this package.
    """
    if processes not in _known:
        _known[processes] = _meet(processes, self_index)
        _meetings[processes] = _meetings.get(processes, 0) + 1
    return _known[processes]


def forget() -> None:
    """Lets go of all shared memory; the next meeting is a new one."""
    _known.clear()


def _meet(processes, me):
    store = _Store(processes)
    pid = os.getpid()
    card = {
        "layout": _LAYOUT,
        "boot": _boot_id(),
        "pid": pid,
        "start": _ffi.process_start_time(pid),
    }
    store.put("hello", me, card)
    cards = store.get_all("hello", processes)
    layouts = {card["layout"] for card in cards.values()}
    if len(layouts) > 1:
        raise CommunicatorError(
            f"processes {list(processes)} run versions of jaxcomm with different "
            f"shared memory layouts {sorted(layouts)}; install one version for all"
        )
    host_of = {}
    for process in processes:
        boot = cards[process]["boot"]
        host_of[process] = min(p for p in processes if cards[p]["boot"] == boot)
    members = tuple(p for p in processes if host_of[p] == host_of[me])
    # Anonymous memory first. Where a sandbox hides /proc/<pid>/fd, a file in /dev/shm.
    refusals = {}
    for attempt in ("memfd", "dev-shm"):
        segment, refusal = None, None
        if len(members) > 1 and (attempt == "memfd" or host_of[me] in refusals):
            segment, refusal = _attach(store, attempt, members, me)
        store.put(f"attached-{attempt}", me, refusal)
        answers = store.get_all(f"attached-{attempt}", processes)
        if segment is not None:
            segment.forget()
        refused = {host_of[p]: text for p, text in answers.items() if text}
        if attempt == "memfd" or host_of[me] in refusals:
            mine = segment if host_of[me] not in refused else None
        refusals = refused
        if not refusals:
            break
    process_set = None
    if mine is not None:
        peers = [(cards[p]["pid"], cards[p]["start"], p) for p in members]
        process_set = _ffi.process_set(mine, peers, members.index(me))
    return Neighbors(host_of, refusals, members, process_set, mine)


def _attach(store, attempt, members, me):
    """Makes the host's segment or attaches to it; returns it, or why not."""
    leader = members[0]
    try:
        if me == leader:
            try:
                segment = _ffi.create_segment(len(members), attempt == "dev-shm")
            except RuntimeError as error:
                store.put(f"segment-{attempt}", me, {"error": str(error)})
                raise
            store.put(f"segment-{attempt}", me, {"address": segment.address()})
            return segment, None
        found = store.get_all(f"segment-{attempt}", (leader,))[leader]
        if "error" in found:
            return None, found["error"]
        return _ffi.attach_segment(*found["address"]), None
    except RuntimeError as error:
        return None, f"process {me}: {error}"


class _Store:
    """The part of the key-value store that one meeting of a set of processes uses."""

    def __init__(self, processes):
        self.client = _jax_compat.key_value_store()
        if self.client is None:
            raise CommunicatorError(
                f"processes {list(processes)} cannot find each other: call "
                f"jax.distributed.initialize() in each of them first"
            )
        name = hashlib.sha256(repr(processes).encode()).hexdigest()[:16]
        self.prefix = f"jaxcomm/{name}/{_meetings.get(processes, 0)}"
        self.deadline = time.monotonic() + config.timeout_seconds()

    def put(self, what, process, value):
        # Again after an attempt that failed because others did not come.
        self.client.key_value_set(
            f"{self.prefix}/{what}/{process}", json.dumps(value), allow_overwrite=True
        )

    def get_all(self, what, processes):
        found, missing = {}, []
        for process in processes:
            value = self._get(f"{self.prefix}/{what}/{process}")
            if value is None:
                missing.append(process)
            else:
                found[process] = json.loads(value)
        if missing:
            raise CommunicatorError(
                f"waited {config.timeout_seconds():g} s for process"
                f"{'es' if len(missing) > 1 else ''} {', '.join(map(str, missing))} "
                f"of {list(processes)} to make communicators too ({what}). Every "
                f"process of the mesh must call jaxcomm.init, or run the program that "
                f"needs them; see JAXCOMM_TIMEOUT"
            )
        return found

    def _get(self, key):
        while True:
            rest = self.deadline - time.monotonic()
            # Past the deadline too: whoever has come is not to be called missing.
            wait = max(min(rest, _SLICE_SECONDS), 0.02)
            try:
                return self.client.blocking_key_value_get(key, int(wait * 1000))
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                if rest <= 0:
                    return None


def _boot_id() -> str:
    """Names the running system: containers of one host share it, two hosts do not."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
