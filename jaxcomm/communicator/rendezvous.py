"""How processes agree: who takes part, who shares a host, and where its memory is.

Everything goes through the key-value store of ``jax.distributed``, with a deadline
that names the processes which did not come. What is decided from it (which backend
serves a partition) is decided from what all of them published, and so alike on all.

A meeting costs a process three writes and, where all come at about the same time, a few
reads, however many they are: one read shows what all have written. Processes that come
to it for different reasons, such as to make different communicators, are told so at
once, each what the others wanted.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import time
from typing import Any

from jaxcomm import _ffi, compat, config
from jaxcomm.errors import CommunicatorError

# Processes that share memory must agree on what lies where in it.
_LAYOUT = _ffi.shared_memory_layout()
# One blocking look into the store; Ctrl-C is seen in between. Each is twice as long as
# the one before, so that a thousand processes which wait for one leave the store in
# peace.
_FIRST_SLICE_SECONDS = 0.25
_LAST_SLICE_SECONDS = 2.0
# Where in the store each process says which meeting it was at last.
_LAST = "jaxcomm/last"


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


@dataclasses.dataclass(frozen=True)
class Purpose:
    """Why a process comes to a meeting: the same on all that meet.

    Attributes:
      what: as in "process 0 is to ...".
      key: tells purposes apart whose words are the same.
      number: the how-many-th of the kind this process comes for; only told.
    """

    what: str
    key: int = 0
    number: int | None = None

    def __str__(self):
        count = "" if self.number is None else f", its number {self.number}"
        return self.what + count


@dataclasses.dataclass(frozen=True)
class Met:
    """What a meeting brought.

    Attributes:
      values: what each process gave.
      peers: (pid, start time, process, thread) of those whose end this one can see: the
        others on this host, in the same namespace of process ids. The thread ends as
        soon as its process begins to.
    """

    values: dict[int, Any]
    peers: list[tuple[int, int, int, int]]


_known: dict[tuple[int, ...], Neighbors] = {}
# How many meetings of a set this process has been to, whatever came of them; by the set
# and the process.
_meetings: dict[tuple[tuple[int, ...], int], int] = {}
# Objections of other processes that this one raised: each once.
_heard: set[tuple[int, str]] = set()


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
        purpose = Purpose("find out who shares memory")
        _known[processes] = _meet(processes, self_index, purpose, _find_neighbors)
    return _known[processes]


def meet(processes: tuple[int, ...], self_index: int, purpose: Purpose, value) -> Met:
    """Meets the other processes of a set; each of them must call this.

    Args:
      processes, self_index: as for :func:`neighbors`.
      purpose: why.
      value: what this process gives the others, of JSON's types.

    Raises:
      CommunicatorError: if some did not come before the deadline, or came for another
        purpose.
    """

    def tell(store, processes, me):
        cards = store.exchange_cards(value)
        return Met(
            {process: card["value"] for process, card in cards.items()},
            _visible(cards, me),
        )

    return _meet(processes, self_index, purpose, tell)


def exchange(processes: tuple[int, ...], self_index: int, what: str, value) -> dict:
    """Returns what each of the processes gave, once all have come.

    Args:
      processes, self_index: as for :func:`neighbors`.
      what: a name for it.
      value: this process's, of JSON's types.

    Raises:
      CommunicatorError: if some did not come before the deadline, or exchange something
        else.
    """
    return meet(processes, self_index, Purpose(f"exchange {what!r}"), value).values


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
    """Returns :attr:`Met.peers` of a meeting for nothing else.

    Arguments and errors are those of :func:`exchange`.
    """
    if len(processes) == 1:
        return []
    return meet(processes, self_index, Purpose("see each other"), None).peers


def forget() -> None:
    """Lets go of all shared memory; the next meeting is a new one."""
    _known.clear()


def _visible(cards, me):
    return [
        (card["pid"], card["start"], process, card["thread"])
        for process, card in cards.items()
        if process != me and card["boot"] == cards[me]["boot"]
        if _is_visible(card, cards[me])
    ]


def _meet(processes, me, purpose, agree):
    store = _Store(processes, me, purpose, _meetings.get((processes, me), 0))
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
        with contextlib.suppress(Exception):  # the store itself may be gone
            store.leave()
            if not store.has_verdict:
                store.withdraw()
        raise
    finally:
        # Whoever fails never comes to this meeting again, so that nothing which was
        # said in it is taken for an answer in another.
        _meetings[processes, me] = store.number + 1


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
        path, size, nonce = found["address"]
        return _ffi.attach_segment(path, size, nonce, len(members)), None
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

    def __init__(self, processes, me, purpose, number):
        self.client = compat.key_value_store()
        if self.client is None:
            raise CommunicatorError(
                f"processes {list(processes)} cannot find each other: call "
                f"jax.distributed.initialize() in each of them first"
            )
        self.processes, self.me, self.purpose = processes, me, purpose
        name = hashlib.sha256(repr(processes).encode()).hexdigest()[:16]
        self.prefix = f"jaxcomm/{name}"
        self.deadline = time.monotonic() + config.timeout_seconds()
        self.has_verdict = False
        self.objection = None  # for those at this meeting, or at one of another set
        self.go_to(number)

    def go_to(self, number):
        self.number = number
        self._set(f"{self.prefix}/at/{self.me}", number)
        # Which meeting, of any set, this process was at last, and what for.
        here = {
            "processes": self.processes,
            "number": number,
            "purpose": str(self.purpose),
        }
        self._set(f"{_LAST}/{self.me}", here)

    def leave(self):
        """Says that it waits for nobody; a meeting that came about need not."""
        self._set(f"{_LAST}/{self.me}", self.objection)

    def exchange_cards(self, value=None):
        pid = os.getpid()
        card = {
            "layout": _LAYOUT,
            "boot": _boot_id(),
            "pid": pid,
            "start": _ffi.process_start_time(pid),
            "pid_namespace": _pid_namespace(),
            "thread": _ffi.sentinel_thread(),
            "what": self.purpose.what,
            "key": self.purpose.key,
            "number": self.purpose.number,
            "value": value,
        }
        self.put("card", card)
        return self.get_all("card", self.processes)

    def withdraw(self):
        self.put("card", None)

    def put(self, what, value):
        self._set(f"{self.prefix}/{self.number}/{what}/{self.me}", [value])

    def get_all(self, what, processes):
        """Returns what each of the processes put, as soon as they have.

        At that moment all of the set are at this meeting, and none has left it.
        """
        seconds = _FIRST_SLICE_SECONDS
        found = {}
        while True:
            new, left = self._look(what)
            found |= new
            missing = [process for process in processes if process not in found]
            # Who has come and left since is told by the last look: until then those
            # that never came are to be named, and not those that tired of waiting.
            if left.intersection(missing) or (left and not missing):
                self._check_objections(self._entries(_LAST))
                raise _Elsewhere(self.number + 1)
            if not missing:
                return {process: found[process] for process in processes}
            # For one at random: in whatever order they come, half of the others have
            # come before it, so that the number of looks is the logarithm of theirs.
            one = random.choice(missing)
            rest = self.deadline - time.monotonic()
            if rest < 0:
                raise self._late(missing)
            key = f"{self.prefix}/{self.number}/{what}/{one}"
            if not self._comes(key, min(max(rest, 0.05), seconds)):
                self._look_for(missing)
                seconds = min(2 * seconds, _LAST_SLICE_SECONDS)

    def _look(self, what):
        """Returns what is there of this meeting, by process; and who has left it."""
        found, cards = {}, {}
        for key, text in self.client.key_value_dir_get(f"{self.prefix}/{self.number}"):
            _, part, process = key.rsplit("/", 2)
            if part in (what, "card"):
                (value,) = json.loads(text)
                if part == what:
                    found[int(process)] = value
                if part == "card":
                    cards[int(process)] = value
        left = {process for process, card in cards.items() if card is None}
        for process in sorted(cards.keys() - left):
            self._check_purpose(process, cards[process])
        return {p: value for p, value in found.items() if p not in left}, left

    def _look_for(self, missing):
        """Goes where those are that do not come, or says why they never will."""
        at = self._entries(f"{self.prefix}/at")
        number = max((at.get(process, 0) for process in missing), default=0)
        if number > self.number:
            raise _Elsewhere(number)
        last = self._entries(_LAST)
        self._check_objections(last)
        for process in missing:
            other = last.get(process)
            if other is None or "objection" in other:
                continue
            processes, number = tuple(other["processes"]), other["number"]
            if processes == self.processes or self.me not in processes:
                continue
            # What they want of this process it has done, if it was there.
            if number < _meetings.get((processes, self.me), 0):
                continue
            both = {self.me: str(self.purpose), process: other["purpose"]}
            error = self._disagreement(both, f", with processes {list(processes)}")
            self.objection = {
                "objection": str(error),
                "name": os.urandom(8).hex(),
                "meetings": [(processes, number), (self.processes, self.number)],
            }
            raise error

    def _check_objections(self, last):
        """Raises if another process has said that this meeting cannot come about."""
        for process in self.processes:
            other = last.get(process)
            if other is None or "objection" not in other:
                continue
            name = self.me, other["name"]
            here = [list(self.processes), self.number]
            if here in other["meetings"] and name not in _heard:
                _heard.add(name)
                raise CommunicatorError(other["objection"])

    def _check_purpose(self, process, card):
        mine = self.purpose
        # A version of this package that says nothing of it has another layout, too.
        other = Purpose(
            card.get("what", mine.what), card.get("key", mine.key), card.get("number")
        )
        if (other.what, other.key) != (mine.what, mine.key):
            # All see the same cards, if not at once: they stay.
            self.has_verdict = True
            raise self._disagreement({self.me: str(mine), process: str(other)}, "")

    def _disagreement(self, purposes, where):
        text = "; ".join(f"process {p} is to {t}" for p, t in sorted(purposes.items()))
        return CommunicatorError(
            f"processes {list(self.processes)} are out of step: {text}{where}. Every "
            f"process must make the same communicators in the same order: call "
            f"jaxcomm.init with the same arguments on all of them, before programs "
            f"that only some of them run"
        )

    def _late(self, missing):
        return CommunicatorError(
            f"waited {config.timeout_seconds():g} s for process"
            f"{'es' if len(missing) > 1 else ''} "
            f"{', '.join(map(str, missing))} of {list(self.processes)} to make "
            f"communicators too. Every process of the mesh must call "
            f"jaxcomm.init, or run the program that needs them; see "
            f"JAXCOMM_TIMEOUT"
        )

    def _entries(self, folder):
        """Returns the entries of a folder of the store, by process."""
        return {
            int(key.rsplit("/", 1)[1]): json.loads(text)
            for key, text in self.client.key_value_dir_get(folder)
        }

    def _set(self, key, value):
        self.client.key_value_set(key, json.dumps(value), allow_overwrite=True)

    def _comes(self, key, seconds):
        """Waits for an entry and says whether it came before the store gave up."""
        try:
            self.client.blocking_key_value_get(key, max(1, int(seconds * 1000)))
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return False
            raise
        return True


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
