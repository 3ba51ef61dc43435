"""One round of a rendezvous, as a process sees it.

Rounds are numbered, and each process counts its own. A process that failed where others
did not is at another number. A round with a process that failed is over, and all go on
to the next: so they meet in the latest.

A round has phases, one for each :meth:`Round.collect`.
"""

import dataclasses
import hashlib
import time
import weakref
from typing import Any, NoReturn

from jaxcomm import config
from jaxcomm.communicator import elsewhere, peer_info, tree
from jaxcomm.communicator import purpose as purposes
from jaxcomm.communicator.peer_info import PeerInfo
from jaxcomm.communicator.phase import Phase, Verdict
from jaxcomm.communicator.purpose import Purpose
from jaxcomm.communicator.sealed import EntryError
from jaxcomm.communicator.store import Store
from jaxcomm.errors import CommunicatorError

# A set of processes, and one of them.
_Member = tuple[tuple[int, ...], int]


@dataclasses.dataclass
class _Past:
    """What processes remember of a job's rounds: this one, but in tests.

    Attributes:
      finished: how many rounds of a set a process has finished, whatever came of them.
      told: what a process told the others of a set about itself.
      raised: errors of two rounds that a process raised: each once.
    """

    finished: dict[_Member, int] = dataclasses.field(default_factory=dict)
    told: dict[_Member, PeerInfo] = dataclasses.field(default_factory=dict)
    raised: set[tuple[int | str, ...]] = dataclasses.field(default_factory=set)


# By the job's store. Another job knows nothing of this one's rounds.
_pasts: weakref.WeakKeyDictionary[Store, _Past] = weakref.WeakKeyDictionary()


class NewerRound(Exception):
    """Peers are in a newer round, or will be: :meth:`Round.go_on` enters it."""


class Round:
    """This process in one round of a set of processes."""

    def __init__(
        self, store: Store, processes: tuple[int, ...], me: int, purpose: Purpose
    ):
        self._store = store
        self._processes, self._me, self._purpose = processes, me, purpose
        name = hashlib.sha256(repr(processes).encode()).hexdigest()[:16]
        self._folder = f"jaxcomm/{name}"
        self._timeout = config.timeout_seconds()
        self._deadline = time.monotonic() + self._timeout
        self._past = _pasts.setdefault(store, _Past())
        info = peer_info.of_this_process()
        self._host = f"{self._folder}/host/{info.boot}"
        if self._past.told.get((processes, me)) != info:
            store.set(f"{self._host}/{me}", dataclasses.asdict(info), me)
            self._past.told[processes, me] = info
        self._enter(self._past.finished.get((processes, me), 0))

    def _enter(self, number: int) -> None:
        self._number = number
        self._is_over = False
        path = f"{self._folder}/{number}"
        self._begin(path, 0)
        elsewhere.enter(
            self._store, self._me, path, self._processes, str(self._purpose)
        )

    def _begin(self, path: str, phase: int) -> None:
        self._phase = Phase(
            self._store,
            self._processes,
            self._me,
            self._purpose,
            self._deadline,
            path,
            phase,
        )

    def go_on(self) -> None:
        """Enter the next round."""
        self._enter(self._number + 1)

    def finish(self) -> None:
        """Never enter this round again, whatever came of it.

        So nothing that was said in it is taken for an answer in another.
        """
        self._past.finished[self._processes, self._me] = self._number + 1

    def leave(self) -> None:
        """End the round for all, because this process failed."""
        if self._is_over:
            return
        left = {"left": self._me}
        try:
            came_about = "all" in self._phase.decide(left)
        except EntryError:
            # Its writer knows. It goes on, if nobody else does.
            came_about = True
        if came_about:
            # The others go on to another phase.
            self._begin(self._phase.round, self._phase.number + 1)
            self._phase.decide(left)

    def collect(self, value: Any = None) -> dict[int, Any]:
        """Return what each process gives, of JSON's types, by process.

        Raises:
          NewerRound: this round did not come about.
          CommunicatorError: nor can a newer one in time.
        """
        verdict = self._phase.exchange(value)
        if "all" not in verdict:
            self._give_up(verdict)
        self._begin(self._phase.round, self._phase.number + 1)
        return tree.expand(verdict["all"], self._processes)

    def put(self, what: str, value: Any) -> None:
        """Publish a value of this process for the ones that :meth:`fetch` it."""
        self._phase.put(what, value)

    def fetch(self, what: str, process: int) -> Any:
        """Return what a process put since the last :meth:`collect`.

        Raises:
          NewerRound, CommunicatorError: as for :meth:`collect`.
        """
        found, verdict = self._phase.fetch(what, process)
        if verdict is not None:
            self._give_up(verdict)
        return found

    def infos_of_host(self) -> dict[int, PeerInfo]:
        """Return the infos of this host's processes of the set, once all have come."""
        return {
            process: PeerInfo(**fields)
            for process, fields in self._store.entries(self._host).items()
        }

    def _give_up(self, verdict: Verdict) -> NoReturn:
        """Raise what follows from a verdict that this round did not come about."""
        self._is_over = True
        if "error" in verdict:
            # Of two rounds: who raised it in one may enter the other.
            name = self._me, *verdict.get("rounds", [self._phase.round])
            if name not in self._past.raised:
                self._past.raised.add(name)
                raise CommunicatorError(verdict["error"])
        if "late" in verdict:
            self._wait_for_late(verdict["late"])
        raise NewerRound

    def _wait_for_late(self, late: list[int]) -> None:
        """Return once one of the late processes came.

        Until then a newer round would fail like this one. So the processes of this one
        stay here, however many of them leave it at their own deadlines.
        """
        key = f"{self._folder}/{self._number + 1}/began"
        if self._me in late:
            self._store.set(key, True, self._me)
            return
        while time.monotonic() < self._deadline:
            if self._phase.step(key) is not None:
                return
        raise CommunicatorError(purposes.late(self._processes, late, self._timeout))
