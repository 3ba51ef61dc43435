"""One exchange of values in a round, up a tree and down again.

Values go up a tree, and one verdict comes down: an entry that all wait for, and that is
written once. Whoever writes it decides for all. The root writes the values of all. A
process that fails, or waited in vain, writes that the round is over. So all processes
end a phase alike, and none leaves a round that came about.

A phase costs most processes one write and one wait. A leader also reads what its block
wrote, a few times. Nobody reads what every process wrote.
"""

import dataclasses
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

from jaxcomm.communicator import elsewhere, tree
from jaxcomm.communicator import purpose as purposes
from jaxcomm.communicator.purpose import Purpose
from jaxcomm.communicator.sealed import EntryError
from jaxcomm.communicator.store import Store
from jaxcomm.errors import CommunicatorError

# One blocking wait in the store; Ctrl-C is seen in between. Each takes twice as long as
# the one before. So a thousand processes that wait for one do not flood the store.
_FIRST_WAIT_SECONDS = 0.25
_LAST_WAIT_SECONDS = 2.0
# Even at the deadline: what is there must be found.
_LEAST_WAIT_SECONDS = 0.05

# One of these: {"all": runs of values}, {"error": text}, {"left": the process that
# failed} and {"late": processes that did not come in time}.
Verdict = dict[str, Any]
_Bundle = dict[str, tree.Runs]


@dataclasses.dataclass
class Phase:
    """This process in one phase of a round.

    Attributes:
      store: of the job.
      processes: of the round.
      me: this process.
      purpose: of the round.
      deadline: by ``time.monotonic``.
      round: path of the round's entries in the store.
      number: of the phase in its round, from 0 on.
    """

    store: Store
    processes: tuple[int, ...]
    me: int
    purpose: Purpose
    deadline: float
    round: str
    number: int = 0

    def __post_init__(self):
        self._verdict_key = elsewhere.verdict_key(self.round, self.number)
        self._place = self.processes.index(self.me)
        self._patience = _FIRST_WAIT_SECONDS
        # Of the block that this process leads, or in which it waits for the leader.
        self._stride, self._leader = 1, 0

    def exchange(self, value: Any) -> Verdict:
        """Give a value; return the verdict. Every process of the round calls this."""
        try:
            return self._exchange(value)
        except EntryError as error:
            return self._refuse(error)

    def _exchange(self, value: Any) -> Verdict:
        verdict = self._climb(value)
        while verdict is None:
            verdict = self.step(self._verdict_key)
            if verdict is None:
                self._look_around([self.processes[self._leader]])
                # Once a step on average, one of a block stands in for its leader.
                if random.randrange(len(self._block())) == 0:
                    self._inspect()
        return verdict

    def decide(self, verdict: Verdict) -> Verdict:
        """Write the verdict if there is none; return the one that counts."""
        if self.store.set_once(self._verdict_key, verdict, self.me):
            return verdict
        return self.store.get(self._verdict_key)

    def put(self, what: str, value: Any) -> None:
        """Publish a value of this process for the ones that :meth:`fetch` it."""
        self.store.set(self._key(what, self.me), value, self.me)

    def fetch(self, what: str, process: int) -> tuple[Any, Verdict | None]:
        """Wait for what a process puts; return it, or the verdict if that comes."""
        try:
            while (found := self.step(self._key(what, process))) is None:
                self._look_around([process], lambda: [process])
                if (verdict := self.store.get(self._verdict_key)) is not None:
                    return None, verdict
        except EntryError as error:
            return None, self._refuse(error)
        return found, None

    def step(self, key: str) -> Any:
        """Wait for an entry; return it, None if it did not come in one step."""
        rest = max(_LEAST_WAIT_SECONDS, self.deadline - time.monotonic())
        found = self.store.wait(key, min(rest, self._patience))
        if found is None:
            self._patience = min(2 * self._patience, _LAST_WAIT_SECONDS)
        return found

    def _refuse(self, error: EntryError) -> Verdict:
        """Decide that all raise what this process found; raise it if they cannot."""
        return self.decide({"error": f"process {self.me}: {error}"})

    def _key(self, *names: int | str) -> str:
        return "/".join(map(str, (self.round, self.number, *names)))

    def _block(self) -> range:
        return tree.members(self._leader, self._stride, len(self.processes))

    def _climb(self, value: Any) -> Verdict | None:
        """Tell leaders; return the verdict if this process is the root."""
        bundle: _Bundle = {
            "purposes": [[1, dataclasses.asdict(self.purpose)]],
            "values": [[1, value]],
        }
        for stride in tree.strides(len(self.processes)):
            self._stride, self._leader = stride, tree.leader(self._place, stride)
            key = self._key(stride, self._leader, self.me)
            if not self.store.set_once(key, bundle, self.me):
                everyone = purposes.names(self.processes)
                raise CommunicatorError(
                    f"process {self.me} met processes {everyone} before: it was "
                    f"started anew, and they were not. Start all of them anew"
                )
            if self._leader != self._place:
                return None
            bundles = self._gather()
            if bundles is None:
                return None
            bundle = {
                name: tree.join(each[name] for each in bundles) for name in bundle
            }
        return self.decide({"all": bundle["values"]})

    def _gather(self) -> list[_Bundle] | None:
        """Return the bundles of a block, in order; None if there is a verdict."""
        while (looked := self._look()) is not None:
            found, missing = looked
            if not missing:
                return [found[place] for place in sorted(found)]
            # Wait for one at random: in whatever order they come, half of the others
            # have come before it. So the number of looks is logarithmic.
            one = self.processes[random.choice(missing)]
            if self.step(self._key(self._stride, self._leader, one)) is None:
                self._look_around([self.processes[place] for place in missing])
                if self.store.get(self._verdict_key) is not None:
                    return None
        return None

    def _inspect(self) -> None:
        """Do for a block what its leader does after a step in vain."""
        if (looked := self._look()) is not None and looked[1]:
            self._look_around([self.processes[place] for place in looked[1]])

    def _look(self) -> tuple[dict[int, _Bundle], list[int]] | None:
        """Return the bundles of a block by place, and the places that are missing.

        Returns:
          None if there is a verdict, because they came for different purposes.
        """
        found = self._told(self._stride, self._leader)
        error = purposes.disagreement(
            {place: bundle["purposes"] for place, bundle in found.items()},
            self.processes,
        )
        if error is not None:
            self.decide({"error": error})
            return None
        return found, [place for place in self._block() if place not in found]

    def _told(self, stride: int, leader: int) -> dict[int, _Bundle]:
        """Return what the members of a block told its leader, by their places."""
        found = self.store.entries(self._key(stride, leader))
        block = tree.members(leader, stride, len(self.processes))
        at = {self.processes[place]: place for place in block}
        return {at[process]: bundle for process, bundle in found.items()}

    def _look_around(
        self, missing: list[int], late: Callable[[], list[int]] | None = None
    ) -> None:
        """After a step in vain, decide that the round is over if it has to be.

        Args:
          missing: processes that this one misses.
          late: returns those to blame at the deadline. If None, all that are missing.
        """
        if time.monotonic() > self.deadline:
            self.decide({"late": (late or self._late)()})
            return
        found = elsewhere.find(self.store, self.round, self.me, self.processes, missing)
        if found is not None:
            error = found.verdict(self.round, self.processes, str(self.purpose))
            # First here: the process that both wait for is in this round.
            if self.decide(error) == error:
                self.store.set_once(elsewhere.verdict_key(found.path), error, self.me)

    def _late(self) -> list[int]:
        """Return the first processes that did not come; one more than are named."""
        places = tree.missing(self._told, len(self.processes))
        first = itertools.islice(places, tree.FAN_IN + 1)
        return [self.processes[place] for place in first]
