"""How processes agree, through the key-value store of ``jax.distributed``.

A set of processes meets in numbered rounds. Each process writes an entry, counts itself
in, and waits for the outcome of the round. The last to come reads all entries and
writes the outcome. There is one outcome: the store takes the first, whoever writes it.
So all processes end a round alike.

=========  ==============================  ============================================
outcome    a process writes it if          then
=========  ==============================  ============================================
``all``    it finds the entries of all     all return what each gave
``error``  it finds that processes do not  all raise, also those that come later
           agree
``late``   it waited in vain, or others    those that came raise; others start again in
           will not come                   the next round
``left``   it fails, or is interrupted     all others start again in the next round
=========  ==============================  ============================================

A process that failed more often than others comes to rounds that have an outcome. It
goes on until it is in the round in which the others wait.

**Cost.** A process sends three messages a round, and two more if it is the last. With
1,024 processes and 0.3 kB of each, the last one reads 0.3 MB. If every process read all
entries, the store would send 1,024 x 0.3 MB. Instead it sends the outcome to all. Equal
values of neighbors are one there: 0.1 MB for 1,024 processes that agree, and 60 MB if
each gives another text of 50 bytes. While processes wait, each asks once a second, and
one of all reads the entries, as the last one does.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import random
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jaxcomm import config
from jaxcomm.communicator import hosts
from jaxcomm.communicator.out_of_step import (
    disagreement,
    listed,
    names,
    out_of_step,
)
from jaxcomm.communicator.store import EntryError, Store, of_job
from jaxcomm.errors import CommunicatorError

_T = TypeVar("_T")
_Outcome = dict[str, Any]

# One wait in the store. Python sees Ctrl-C in between.
_STEP_SECONDS = 1.0
# Even after the timeout: an outcome that is there must be found.
_LEAST_SECONDS = 0.05
# Where processes that wait for others say in which round: [its path, purpose].
_WAITING = "jaxcomm/waiting"
# The rounds in which processes agree who is left after a failure: survivors.py.
SURVIVORS = "jaxcomm/survivors"


def meet(
    processes: tuple[int, ...], me: int, purpose: str, value: Any
) -> dict[int, Any]:
    """Return what each of some processes gave, once all have come.

    Each of them must call this.

    Args:
      processes: JAX's process indices, sorted; this process is one of them.
      me: index of this process.
      purpose: why, as in "process 0 is to ...".
      value: what this process gives the others, of JSON's types.

    Raises:
      CommunicatorError: if some did not come in time, or came for another purpose, or
        run another version of jaxcomm, or this process is none of them.
    """
    return agree(processes, me, purpose, lambda collect: collect(value))


def exchange(
    processes: tuple[int, ...], me: int, what: str, value: Any
) -> dict[int, Any]:
    """Return what each of some processes gave under the name ``what``.

    Other arguments and errors are those of :func:`meet`.
    """
    if len(processes) == 1:
        return {me: value}
    return meet(processes, me, f"exchange {what!r}", value)


def agree(
    processes: tuple[int, ...],
    me: int,
    purpose: str,
    step: Callable[[Callable[[Any], dict[int, Any]]], _T],
) -> _T:
    """Return what ``step(collect)`` gives; each of the processes must call this.

    Args:
      processes: as for :func:`meet`.
      me: as for :func:`meet`.
      purpose: as for :func:`meet`.
      step: may call ``collect(value)`` several times, each a :func:`meet`. If a process
        fails in its step, all others call theirs again.

    Raises:
      CommunicatorError: as for :func:`meet`.
    """
    check_member(processes, me)
    member = _Member(of_job(processes), processes, me, purpose)
    _meeting.add(member)
    try:
        for refusal in _refusals:
            member.end(*refusal)
        while True:
            try:
                return step(member.collect)
            except _StartAgain:
                pass
    except BaseException:
        # Also Ctrl-C: nobody is to wait for this process in this round.
        with contextlib.suppress(Exception):  # the store itself may be gone
            member.leave()
        raise
    finally:
        _meeting.remove(member)
        member.forget()


@contextlib.contextmanager
def refused(why: str, *, for_good: bool) -> Iterator[None]:
    """Have all threads of this process that meet others raise, and let none begin.

    Args:
      why: what the error says.
      for_good: whether the others raise, too, and do not wait for this process.
    """
    refusal = why, for_good
    _refusals.append(refusal)
    try:
        for member in tuple(_meeting):
            member.end(*refusal)
        yield
    finally:
        _refusals.remove(refusal)


def check_member(processes: tuple[int, ...], me: int) -> None:
    """Raise CommunicatorError if a process is none of those that are to agree."""
    if me not in processes:
        raise CommunicatorError(
            f"process {me} has no device in the mesh, whose processes are "
            f"{names(processes)}. Call this on these alone"
        )


class LateError(CommunicatorError):
    """Other processes have ended, or do not come: all that came raise it.

    Attributes:
      processes: these, as far as known.
    """

    def __init__(self, text: str, processes: Sequence[int] = ()):
        super().__init__(text)
        self.processes = processes


def tell_waiting(
    store: Store, processes: Sequence[int], me: int, path: str, purpose: str
) -> None:
    """Say in which round of some processes this one waits, and what for."""
    store.set(f"{path.rpartition('/')[0]}/processes", processes, me)
    store.set(f"{_WAITING}/{me}", [path, purpose], me)


def forget_waiting(store: Store, me: int) -> None:
    """Leave no entry that says that this process waits."""
    with contextlib.suppress(Exception):  # the store itself may be gone
        store.client.key_value_delete(f"{_WAITING}/{me}")


class _StartAgain(Exception):
    """The round did not come about: the step begins anew, in the next."""


@dataclasses.dataclass
class _Past:
    """What processes remember of a job's rounds: this one, but in tests.

    Attributes:
      next: number of the next round, by the set and the process.
      raised: rounds whose error a process has raised, by the round and the process.
    """

    next: dict[tuple, int] = dataclasses.field(default_factory=dict)
    raised: set[tuple[str, int]] = dataclasses.field(default_factory=set)


# By the job's store. Another job knows nothing of this one's rounds.
_pasts: weakref.WeakKeyDictionary[Store, _Past] = weakref.WeakKeyDictionary()


# Of this process, in all of its threads: those who meet others, and why none may.
_meeting: set["_Member"] = set()
_refusals: list[tuple[str, bool]] = []


class _Member:
    """This process in the rounds of a set of processes."""

    def __init__(self, store: Store, processes: tuple[int, ...], me: int, purpose: str):
        self._store, self._processes, self._me = store, processes, me
        self._purpose = purpose
        self._past = _pasts.setdefault(store, _Past())
        name = hashlib.sha256(repr(processes).encode()).hexdigest()[:16]
        self._folder = f"jaxcomm/rounds/{name}"
        self._timeout = config.timeout_seconds()
        self._deadline = time.monotonic() + self._timeout
        # The round of which others know that this process waits in it.
        self._told = ""
        # Whether others know that this process raises.
        self._is_over = False
        # Why another thread has it leave.
        self._ended = ""

    def collect(self, value: Any) -> dict[int, Any]:
        """Return what each process gives, of JSON's types, by process.

        Raises:
          _StartAgain: this round did not come about.
          CommunicatorError: nor can a later one.
        """
        path = self._path
        try:
            outcome = self._enter(value)
        except EntryError as error:
            outcome = self._decide({"error": f"process {self._me}: {error}"})
        self._go_on()
        if self._ended:
            self._is_over = "all" not in outcome
            raise CommunicatorError(
                f"process {self._me} is to {self._purpose}, and waits no longer for "
                f"the others of {names(self._processes)}: {self._ended}"
            )
        if "all" in outcome:
            values = [value for value, count in outcome["all"] for _ in range(count)]
            return dict(zip(self._processes, values, strict=True))
        has_raised = (path, self._me) in self._past.raised
        if "left" in outcome or has_raised or self._me in outcome.get("late", ()):
            raise _StartAgain
        if "other" in outcome:
            self._past.raised.add((outcome["other"], self._me))
        self._is_over = True
        if "late" in outcome:
            raise LateError(outcome["error"], outcome["late"])
        raise CommunicatorError(outcome["error"])

    def end(self, why: str, for_good: bool) -> None:
        """Have it leave, from another thread, which wakes it. See :func:`refused`."""
        self._ended = why
        outcome: _Outcome = {"left": self._me}
        if for_good:
            error = f"process {self._me} does not come to {self._purpose}: {why}"
            outcome = {"late": [self._me], "error": error}
        with contextlib.suppress(Exception):  # the store itself may be gone
            self._store.set_once(_outcome_key(self._path), outcome, self._me)

    def leave(self) -> None:
        """End the round for all, because this process fails."""
        while not self._is_over:
            try:
                outcome = self._decide({"left": self._me})
            finally:
                self._go_on()
            # Processes that had met go on to a round without this process.
            self._is_over = "all" not in outcome

    def forget(self) -> None:
        """Leave no entry that says that this process waits."""
        if self._told:
            forget_waiting(self._store, self._me)

    @property
    def _path(self) -> str:
        """The path of the entries of this round."""
        return f"{self._folder}/{self._past.next.get((self._processes, self._me), 0)}"

    def _go_on(self) -> None:
        """Never enter this round again, so that nothing of it is taken for news."""
        name = self._processes, self._me
        self._past.next[name] = self._past.next.get(name, 0) + 1

    def _decide(self, outcome: _Outcome) -> _Outcome:
        """Write the outcome if there is none; return the one that counts."""
        key = _outcome_key(self._path)
        if self._store.set_once(key, outcome, self._me):
            return outcome
        return self._store.get(key)

    def _enter(self, value: Any) -> _Outcome:
        """Give a value; return the outcome."""
        path, entry = self._path, [self._purpose, value]
        if not self._store.set_once(f"{path}/{self._me}", entry, self._me):
            self._is_over = True
            raise CommunicatorError(
                f"process {self._me} met processes {names(self._processes)} before: "
                f"it was started anew, and they were not. Start all of them anew, or "
                f"have them call jaxcomm.grow"
            )
        count = self._store.client.key_value_increment(f"{path}/count", 1)
        outcome = self._look() if count == len(self._processes) else None
        while outcome is None:
            rest = max(_LEAST_SECONDS, self._deadline - time.monotonic())
            outcome = self._store.wait(_outcome_key(path), min(rest, _STEP_SECONDS))
            if outcome is not None:
                break
            if self._ended:
                return self._decide({"left": self._me})
            if self._told != path:
                tell_waiting(
                    self._store, self._processes, self._me, path, self._purpose
                )
                self._told = path
            # On average one process of all looks in each step.
            if self._is_late() or random.randrange(len(self._processes)) == 0:
                outcome = self._look()
        return outcome

    def _is_late(self) -> bool:
        return time.monotonic() >= self._deadline

    def _look(self) -> _Outcome | None:
        """Look who came; return the outcome if there is one now."""
        came = self._store.entries(self._path, self._processes)
        missing = [process for process in self._processes if process not in came]
        if error := disagreement(self._processes, came):
            return self._decide({"error": error})
        if not missing:
            # By their texts: in Python True equals 1.
            equal = itertools.groupby(json.dumps(value) for _, value in came.values())
            runs = [[json.loads(text), len(list(run))] for text, run in equal]
            return self._decide({"all": runs})
        if self._is_late():
            return self._decide({"late": missing, "error": self._waited_for(missing)})
        if ended := sorted(hosts.ended(missing, self._me)):
            error = f"{listed(ended)} ended before all had met to {self._purpose}"
            return self._decide({"late": ended, "error": error})
        return self._look_elsewhere(came, missing)

    def _look_elsewhere(
        self, came: Mapping[int, Any], missing: Sequence[int]
    ) -> _Outcome | None:
        """End two rounds that wait for each other.

        In each a process is missing that waits in the other: it is to make first what
        the others are to make later.
        """
        for there, waiting in self._store.entries(_WAITING, missing).items():
            path, purpose = waiting
            folder = path.rpartition("/")[0]
            if folder == self._folder:
                continue  # It has come meanwhile.
            processes = self._store.get(f"{folder}/processes")
            here = next((process for process in processes if process in came), None)
            # Read last: if ``here`` had been there before it came here, it is over.
            if here is None or self._store.get(_outcome_key(path)) is not None:
                continue
            if path.startswith(SURVIVORS):
                error = (
                    f"process {there} is to {purpose}, with processes "
                    f"{names(processes)}, and does not come to {self._purpose}"
                )
                return self._decide({"late": [there], "error": error})
            both = {here: self._purpose, there: purpose}
            where = f", with processes {names(processes)}"
            error = out_of_step(self._processes, both, where)
            mine = self._decide({"error": error, "other": path})
            if mine == {"error": error, "other": path}:
                # A process raises in one of the rounds, and may then enter the other.
                other = {"error": error, "other": self._path}
                self._store.set_once(_outcome_key(path), other, self._me)
            return mine
        return None

    def _waited_for(self, missing: Sequence[int]) -> str:
        return (
            f"process {self._me} waited {self._timeout:g} s for "
            f"{listed(missing)} of {names(self._processes)} to make communicators "
            f"too. Every process of the mesh must call "
            f"jaxcomm.init, or run the program that needs them; see JAXCOMM_TIMEOUT"
        )


def _outcome_key(path: str) -> str:
    return f"{path}/outcome"
