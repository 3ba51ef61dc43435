"""Processes that wait for each other in rounds of different sets.

Each makes first what the other makes after it. Neither round can come about. Every
process says which round it entered last. So whoever misses a process sees where it is.
"""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from jaxcomm.communicator import tree
from jaxcomm.communicator.purpose import names, out_of_step
from jaxcomm.communicator.store import Store

# Folder of the store where each process says which round it entered last. In it, one of
# each block of processes: one read returns a block.
_LAST = "jaxcomm/last"
# So many processes are looked up one by one.
_FEW = 2


@dataclasses.dataclass(frozen=True)
class Crossing:
    """Two processes that wait for each other.

    Attributes:
      here: a process of this round that the other round waits for.
      there: a process of the other round that this one waits for.
      path: of the other round.
      processes: of the other round.
      purpose: of the other round.
    """

    here: int
    there: int
    path: str
    processes: list[int]
    purpose: str

    def verdict(
        self, path: str, processes: Sequence[int], purpose: str
    ) -> dict[str, Any]:
        """Return the verdict on both rounds, given what is known of this one.

        It has the same ``rounds`` from whichever of both it comes: a process raises
        it once, and may then enter the other round.
        """
        both = {self.here: purpose, self.there: self.purpose}
        where = f", with processes {names(self.processes)}"
        return {
            "error": out_of_step(processes, both, where),
            "rounds": sorted([path, self.path]),
        }


def verdict_key(path: str, phase: int = 0) -> str:
    """Return the key of how a phase of a round ended."""
    return f"{path}/{phase}/verdict"


def enter(
    store: Store, me: int, path: str, processes: Sequence[int], purpose: str
) -> None:
    """Say which round this process is in."""
    here = {"path": path, "processes": _ranges(processes), "purpose": purpose}
    store.set(_key(me), here, me)


def find(
    store: Store, path: str, me: int, processes: Sequence[int], missing: Sequence[int]
) -> Crossing | None:
    """Return a missing process that waits for one of this round, None if none does.

    Args:
      store: of the job.
      path: of this round, which has no verdict.
      me: this process.
      processes: of this round.
      missing: those that this process waits for. Where there are many, some are looked
        up, and others the next time.
    """
    for there, other in _last(store, missing).items():
        if there not in missing or _set(other["path"]) == _set(path):
            continue
        members = [p for first, last in other["processes"] for p in range(first, last)]
        shared = sorted(set(members).intersection(processes))
        here = _in_round(store, path, me, shared)
        # Only now: had it been there before it came here, there would be a verdict.
        if here is not None and store.get(verdict_key(other["path"])) is None:
            return Crossing(here, there, other["path"], members, other["purpose"])
    return None


def _set(path: str) -> str:
    """Return the folder of all rounds of a set."""
    return path.rpartition("/")[0]


def _in_round(store, path, me, processes) -> int | None:
    """Return one of the processes that is in this round."""
    if me in processes:
        return me
    last = _last(store, processes)
    found = (p for p in processes if p in last and last[p]["path"] == path)
    return next(found, None)


def _last(store: Store, processes: Sequence[int]) -> dict[int, Any]:
    """Return the last rounds of some of the processes, and perhaps of others."""
    if len(processes) > _FEW:
        return store.entries(_key(random.choice(processes)).rpartition("/")[0])
    found = {process: store.get(_key(process)) for process in processes}
    return {process: last for process, last in found.items() if last is not None}


def _key(process: int) -> str:
    return f"{_LAST}/{process // tree.FAN_IN}/{process}"


def _ranges(processes: Sequence[int]) -> list[list[int]]:
    """Return sorted numbers as ranges: of whole hosts, they are few."""
    ranges: list[list[int]] = []
    for process in processes:
        if ranges and ranges[-1][1] == process:
            ranges[-1][1] += 1
        else:
            ranges.append([process, process + 1])
    return ranges
