"""How processes agree: who takes part, who shares a host, and where its memory is.

Everything goes through the key-value store of ``jax.distributed``, with a deadline
that names the processes which did not come. What is decided from it (which backend
serves a partition) is decided from what all of them published, and so alike on all.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import time

from jaxcomm import _ffi, _jax_compat, config
from jaxcomm.errors import CommunicatorError

# Processes that share memory must agree on what lies where in it.
_LAYOUT = _ffi.shared_memory_layout()
# One blocking look into the store; Ctrl-C is seen in between.
_SLICE_SECONDS = 0.25


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
# How many meetings of a set this process has been to, whatever came of them.
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
        _known[processes] = _meet(processes, self_index, _find_neighbors)
    return _known[processes]


def exchange(processes: tuple[int, ...], self_index: int, what: str, value) -> dict:
    """Returns what each of the processes gave, once all have come.

    Args:
      processes, self_index: as for :func:`neighbors`.
      what: a name for it.
      value: this process's, of JSON's types.

    Raises:
      CommunicatorError: if some did not come before the deadline.
    """

    def tell(store, processes, me):
        store.exchange_cards()
        store.put(what, value)
        found = store.get_all(what, processes)
        store.check_all_are_here()
        return found

    return _meet(processes, self_index, tell)


def broadcast(processes: tuple[int, ...], self_index: int, what: str, make):
    """Returns what ``make()`` gave the first of the processes, once all have come.

    Arguments and errors are those of :func:`exchange`.
    """
    first = processes[0]
    if len(processes) == 1:
        return make()
    value = make() if self_index == first else None
    return exchange(processes, self_index, what, value)[first]


def peers(
    processes: tuple[int, ...], self_index: int
) -> list[tuple[int, int, int, int]]:
    """Returns (pid, start time, process, thread) of those whose end this one can see.

    Those are the others on this host, in the same namespace of process ids; the thread
    ends as soon as its process begins to. Arguments and errors are those of
    :func:`exchange`.
    """
    if len(processes) == 1:
        return []

    def tell(store, processes, me):
        cards = store.exchange_cards()
        store.check_all_are_here()
        return [
            (card["pid"], card["start"], process, card["thread"])
            for process, card in cards.items()
            if process != me and card["boot"] == cards[me]["boot"]
            if _is_visible(card, cards[me])
        ]

    return _meet(processes, self_index, tell)


def forget() -> None:
    """Lets go of all shared memory; the next meeting is a new one."""
    _known.clear()


def _meet(processes, me, agree):
    store = _Store(processes, me, _meetings.get(processes, 0))
    try:
        while True:
            try:
                return agree(store, processes, me)
            except _Elsewhere as elsewhere:
                store.withdraw()
                store.go_to(elsewhere.number)
    except BaseException:
        # Also Ctrl-C: nobody is to count on what this process said so far. Unless it
        # is a verdict that all reach from the cards, and the others have yet to.
        if not store.has_verdict:
            with contextlib.suppress(Exception):  # the store itself may be gone
                store.withdraw()
        raise
    finally:
        # Whoever fails never comes to this meeting again, so that nothing which was
        # said in it is taken for an answer in another.
        _meetings[processes] = store.number + 1


def _find_neighbors(store, processes, me):
    cards = store.exchange_cards()
    layouts = {card["layout"] for card in cards.values()}
    if len(layouts) > 1:
        store.has_verdict = True
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
    segment, refusals = None, dict.fromkeys(host_of.values(), "")
    for attempt in ("memfd", "dev-shm"):
        refusal = None
        if len(members) > 1 and host_of[me] in refusals:
            segment, refusal = _attach(store, attempt, members, me)
        store.put(f"attached-{attempt}", refusal)
        answers = store.get_all(f"attached-{attempt}", processes)
        if segment is not None:
            segment.forget()
        refusals = {host_of[p]: text for p, text in answers.items() if text}
        if host_of[me] in refusals:
            segment = None
        if not refusals:
            break
    store.check_all_are_here()
    process_set = None
    if segment is not None:
        # The id 0 means that nobody watches the process.
        peers = [
            (
                cards[p]["pid"] if _is_visible(cards[p], cards[me]) else 0,
                cards[p]["start"],
                p,
            )
            for p in members
        ]
        process_set = _ffi.process_set(segment, peers, members.index(me))
    return Neighbors(host_of, refusals, members, process_set, segment)


def _attach(store, attempt, members, me):
    """Makes the host's segment or attaches to it; returns it, or why not."""
    leader = members[0]
    try:
        if me == leader:
            try:
                segment = _ffi.create_segment(len(members), attempt == "dev-shm")
            except RuntimeError as error:
                store.put(f"segment-{attempt}", {"error": f"process {me}: {error}"})
                raise
            store.put(f"segment-{attempt}", {"address": segment.address()})
            return segment, None
        found = store.get_all(f"segment-{attempt}", (leader,))[leader]
        if "error" in found:
            return None, found["error"]
        return _ffi.attach_segment(*found["address"], len(members)), None
    except RuntimeError as error:
        return None, f"process {me}: {error}"


class _Elsewhere(Exception):
    """Others are at a later meeting, or left this one: so must we go on to it."""

    def __init__(self, number):
        self.number = number


class _Store:
    """The part of the key-value store that the meetings of a set of processes use.

    Meetings are numbered, and each process counts its own: a process that failed where
    others did not is at another number then. All say where they are, and go on to the
    latest. Each hands in a card first and takes it back when it leaves without result.
    """

    def __init__(self, processes, me, number):
        self.client = _jax_compat.key_value_store()
        if self.client is None:
            raise CommunicatorError(
                f"processes {list(processes)} cannot find each other: call "
                f"jax.distributed.initialize() in each of them first"
            )
        self.processes, self.me = processes, me
        name = hashlib.sha256(repr(processes).encode()).hexdigest()[:16]
        self.prefix = f"jaxcomm/{name}"
        self.deadline = time.monotonic() + config.timeout_seconds()
        self.has_verdict = False
        self.go_to(number)

    def go_to(self, number):
        self.number = number
        self._set(f"at/{self.me}", number)

    def exchange_cards(self):
        pid = os.getpid()
        card = {
            "layout": _LAYOUT,
            "boot": _boot_id(),
            "pid": pid,
            "start": _ffi.process_start_time(pid),
            "pid_namespace": _pid_namespace(),
            "thread": _ffi.life_thread(),
        }
        self.put("card", card)
        return self.get_all("card", self.processes)

    def withdraw(self):
        self.put("card", None)

    def put(self, what, value):
        self._set(f"{self.number}/{what}/{self.me}", [value])

    def get_all(self, what, processes):
        """Returns what each of the processes put, as soon as they have."""
        found = self._collect(f"{self.number}/{what}", processes)
        return {process: value for process, [value] in found.items()}

    def check_all_are_here(self):
        for process in self.processes:
            # Its value may have changed since it was there.
            text = self._get_at_once(f"{self.number}/card/{process}")
            if text is None or json.loads(text) == [None]:
                raise _Elsewhere(self.number + 1)

    def _collect(self, what, processes):
        found = {}
        while True:
            for process in processes:
                if process not in found:
                    rest = max(self.deadline - time.monotonic(), 0.05)
                    # Returns as soon as it is there; Ctrl-C is seen in between.
                    value = self._get(f"{what}/{process}", min(rest, _SLICE_SECONDS))
                    if value == [None] and what.endswith("/card"):
                        raise _Elsewhere(self.number + 1)
                    if value is not None:
                        found[process] = value
            missing = [process for process in processes if process not in found]
            if not missing:
                return found
            for process in missing:
                number = json.loads(self._get_at_once(f"at/{process}") or "0")
                if number > self.number:
                    raise _Elsewhere(number)
            if time.monotonic() > self.deadline:
                raise CommunicatorError(
                    f"waited {config.timeout_seconds():g} s for process"
                    f"{'es' if len(missing) > 1 else ''} "
                    f"{', '.join(map(str, missing))} of {list(self.processes)} to make "
                    f"communicators too. Every process of the mesh must call "
                    f"jaxcomm.init, or run the program that needs them; see "
                    f"JAXCOMM_TIMEOUT"
                )

    def _set(self, key, value):
        self.client.key_value_set(
            f"{self.prefix}/{key}", json.dumps(value), allow_overwrite=True
        )

    def _get_at_once(self, key):
        """Returns an entry's text, None if there is none."""
        try:
            return self.client.key_value_try_get(f"{self.prefix}/{key}")
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def _get(self, key, seconds):
        """Returns an entry, None if it did not come or the store was slow."""
        try:
            text = self.client.blocking_key_value_get(
                f"{self.prefix}/{key}", max(1, int(seconds * 1000))
            )
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise
        return json.loads(text)


def _is_visible(card, own) -> bool:
    """Returns whether the id of the card's process means that process here too.

    Containers of one host may share memory and yet number their processes apart. The
    id of a process of another container then belongs to another process here, or to
    none, and the process would be taken for dead.
    """
    if card["pid_namespace"] and own["pid_namespace"]:
        return card["pid_namespace"] == own["pid_namespace"]
    return 0 != _ffi.process_start_time(card["pid"]) == card["start"]


def _pid_namespace() -> str | None:
    """Names the namespace of process ids, None where /proc does not show it."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _boot_id() -> str:
    """Names the running system: containers of one host share it, two hosts do not."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
