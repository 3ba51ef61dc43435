"""One round of a rendezvous, as a process sees it.

A round costs a process three writes and a few reads if all come at about the same
time, however many they are: one read returns what all have written. Processes that come
for different purposes, such as to make different communicators, raise at once. The
error names both purposes.
"""

import dataclasses
import hashlib
import os
import random
import time
from collections.abc import Iterable
from typing import Any

from jaxcomm import config
from jaxcomm.communicator import peer_info
from jaxcomm.communicator.peer_info import PeerInfo
from jaxcomm.communicator.store import Store
from jaxcomm.errors import CommunicatorError

# One blocking wait in the store; Ctrl-C is seen in between. Each takes twice as long as
# the one before. So a thousand processes that wait for one do not flood the store.
_FIRST_WAIT_SECONDS = 0.25
_LAST_WAIT_SECONDS = 2.0
# Folder of the store where each process says which round it entered last.
_LAST = "jaxcomm/last"


@dataclasses.dataclass(frozen=True)
class Purpose:
    """Why a process enters a round: the same on all processes of the round.

    Attributes:
      what: as in "process 0 is to ...".
      key: tells purposes apart whose words are the same.
      number: 1-based count of this process's purposes of the kind. Only for messages.
    """

    what: str
    key: int = 0
    number: int | None = None

    def __str__(self) -> str:
        """Return the words of a message."""
        count = "" if self.number is None else f", its number {self.number}"
        return self.what + count


# How many rounds of a set a process has finished, whatever came of them. By set and
# process.
finished: dict[tuple[tuple[int, ...], int], int] = {}
# Objections of other processes that this process raised: each once.
_raised: set[tuple[int, str]] = set()


class Round:
    """This process in one round of a set of processes.

    Rounds are numbered, and each process counts its own. A process that failed where
    others did not is at another number. All publish their number and go on to the
    latest. Each process publishes its info on entry, and withdraws it if the round
    fails.

    Attributes:
      number: of the round.
      values: what each process gave, once :meth:`collect_infos` has returned.
      has_verdict: whether all reach the same error from what was published.
    """

    def __init__(
        self,
        store: Store,
        processes: tuple[int, ...],
        me: int,
        purpose: Purpose,
        number: int,
    ):
        self._store = store
        self._processes, self._me, self._purpose = processes, me, purpose
        name = hashlib.sha256(repr(processes).encode()).hexdigest()[:16]
        self._folder = f"jaxcomm/{name}"
        self._timeout = config.timeout_seconds()
        self._deadline = time.monotonic() + self._timeout
        # For peers in this round, or in one of another set.
        self._objection: dict[str, Any] | None = None
        self.values: dict[int, Any] = {}
        self.has_verdict = False
        self._enter(number)

    def _enter(self, number: int) -> None:
        self.number = self._newest = number
        self._store.set(f"{self._folder}/at/{self._me}", number)
        # Which round, of any set, this process entered last, and what for.
        here = {
            "processes": self._processes,
            "number": number,
            "purpose": str(self._purpose),
        }
        self._store.set(f"{_LAST}/{self._me}", here)

    def go_on(self) -> None:
        """Leave this round for the newer one that peers are in."""
        self.withdraw()
        self._enter(self._newest)

    def leave(self) -> None:
        """Say that this process waits for nobody. Not needed after a success."""
        self._store.set(f"{_LAST}/{self._me}", self._objection)

    def withdraw(self) -> None:
        """Take back this process's info."""
        self.put("card", None)

    def put(self, what: str, value: Any) -> None:
        """Publish a value of this process."""
        self._store.set(f"{self._folder}/{self.number}/{what}/{self._me}", [value])

    def collect_infos(self, value: Any = None) -> dict[int, PeerInfo] | None:
        """Publish this process's info and a value; return the infos of all.

        Returns:
          By process; None if a newer round began.
        """
        own = dataclasses.asdict(peer_info.of_this_process())
        self.put("card", own | dataclasses.asdict(self._purpose) | {"value": value})
        cards = self.collect("card", self._processes)
        if cards is None:
            return None
        self.values = {process: card["value"] for process, card in cards.items()}
        return {
            process: PeerInfo(**{name: card.get(name) for name in own})
            for process, card in cards.items()
        }

    def collect(self, what: str, processes: Iterable[int]) -> dict[int, Any] | None:
        """Return what each of the processes put, as soon as they have.

        At that moment all of the set are in this round, and none has left it.

        Returns:
          By process; None if a newer round began.
        """
        seconds = _FIRST_WAIT_SECONDS
        found: dict[int, Any] = {}
        # Where missing processes were when a wait for one was over.
        newest, last = self.number, None
        while True:
            new, left = self._look(what)
            found |= new
            missing = [process for process in processes if process not in found]
            # A peer that timed out leaves. The error is to name the processes that it
            # waited for, and not the peer: so a peer counts as left only where it is
            # missing itself, or where nobody is.
            if left.intersection(missing) or (left and not missing):
                self._check_objections(self._store.by_process(_LAST))
                self._newest = self.number + 1
                return None
            if not missing:
                return {process: found[process] for process in processes}
            # Only now: what was missing may have come, ended this round and gone on
            # before this process saw where it is.
            if newest > self.number:
                self._newest = newest
                return None
            if last is not None:
                self._check_last_rounds(missing, last)
                last = None
            # Wait for one at random: in whatever order they come, half of the others
            # have come before it. So the number of looks is logarithmic.
            one = random.choice(missing)
            rest = self._deadline - time.monotonic()
            if rest < 0:
                raise self._late(missing)
            key = f"{self._folder}/{self.number}/{what}/{one}"
            if not self._store.wait(key, min(max(rest, 0.05), seconds)):
                newest = max(self.number, self._round_of(missing))
                if newest == self.number:
                    last = self._store.by_process(_LAST)
                seconds = min(2 * seconds, _LAST_WAIT_SECONDS)

    def _look(self, what: str) -> tuple[dict[int, Any], set[int]]:
        """Return what processes put in this round, and which have left it."""
        found, cards = {}, {}
        for key, (value,) in self._store.entries(f"{self._folder}/{self.number}"):
            _, name, process = key.rsplit("/", 2)
            if name == what:
                found[int(process)] = value
            if name == "card":
                cards[int(process)] = value
        left = {process for process, card in cards.items() if card is None}
        for process in sorted(cards.keys() - left):
            self._check_purpose(process, cards[process])
        return {p: value for p, value in found.items() if p not in left}, left

    def _round_of(self, missing: list[int]) -> int:
        """Return the newest round that one of the missing processes is in."""
        at = self._store.by_process(f"{self._folder}/at")
        return max((at.get(process, 0) for process in missing), default=0)

    def _check_last_rounds(self, missing: list[int], last: dict[int, Any]) -> None:
        """Raise if a missing process waits for this one in a round of another set."""
        self._check_objections(last)
        for process in missing:
            other = last.get(process)
            if other is None or "objection" in other:
                continue
            processes, number = tuple(other["processes"]), other["number"]
            if processes == self._processes or self._me not in processes:
                continue
            # This process was there already, and the other waits for it no more.
            if number < finished.get((processes, self._me), 0):
                continue
            both = {self._me: str(self._purpose), process: other["purpose"]}
            error = self._disagreement(both, f", with processes {list(processes)}")
            self._objection = {
                "objection": str(error),
                "name": os.urandom(8).hex(),
                "meetings": [(processes, number), (self._processes, self.number)],
            }
            raise error

    def _check_objections(self, last: dict[int, Any]) -> None:
        """Raise if another process has said that this round cannot come about."""
        for process in self._processes:
            other = last.get(process)
            if other is None or "objection" not in other:
                continue
            name = self._me, other["name"]
            here = [list(self._processes), self.number]
            if here in other["meetings"] and name not in _raised:
                _raised.add(name)
                raise CommunicatorError(other["objection"])

    def _check_purpose(self, process: int, card: dict[str, Any]) -> None:
        mine = self._purpose
        # An older version of this package publishes none. Its layout differs, too.
        other = Purpose(
            card.get("what", mine.what), card.get("key", mine.key), card.get("number")
        )
        if (other.what, other.key) != (mine.what, mine.key):
            # All see the same infos, if not at once. So they stay published.
            self.has_verdict = True
            raise self._disagreement({self._me: str(mine), process: str(other)}, "")

    def _disagreement(self, purposes: dict[int, str], where: str) -> CommunicatorError:
        text = "; ".join(f"process {p} is to {t}" for p, t in sorted(purposes.items()))
        return CommunicatorError(
            f"processes {list(self._processes)} are out of step: {text}{where}. Every "
            f"process must make the same communicators in the same order: call "
            f"jaxcomm.init with the same arguments on all of them, before programs "
            f"that only some of them run"
        )

    def _late(self, missing: list[int]) -> CommunicatorError:
        return CommunicatorError(
            f"waited {self._timeout:g} s for process"
            f"{'es' if len(missing) > 1 else ''} "
            f"{', '.join(map(str, missing))} of {list(self._processes)} to make "
            f"communicators too. Every process of the mesh must call "
            f"jaxcomm.init, or run the program that needs them; see "
            f"JAXCOMM_TIMEOUT"
        )
