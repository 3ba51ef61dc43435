"""Why processes enter a round, and what they are told if they do not agree on it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxcomm.communicator import tree


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


def names(processes: Sequence[int]) -> str:
    """Return the numbers of processes; of many, the first and the last."""
    if len(processes) <= tree.FAN_IN:
        return str(list(processes))
    first = ", ".join(map(str, processes[:3]))
    return f"[{first}, ..., {processes[-1]}] ({len(processes)} processes)"


def disagreement(
    bundles: Mapping[int, tree.Runs], processes: Sequence[int]
) -> str | None:
    """Return the error of processes that came for different purposes, None if none did.

    Args:
      bundles: runs of purposes, by the place of the first process of a bundle.
      processes: of the set.
    """
    first: dict[tuple[str, int], tuple[int, Purpose]] = {}
    for place, runs in sorted(bundles.items()):
        for count, fields in runs:
            purpose = Purpose(**fields)
            first.setdefault((purpose.what, purpose.key), (processes[place], purpose))
            place += count
    if len(first) <= 1:
        return None
    two = list(first.values())[:2]
    return out_of_step(processes, {process: str(purpose) for process, purpose in two})


def out_of_step(
    processes: Sequence[int], purposes: Mapping[int, str], where: str = ""
) -> str:
    """Return the error of processes with different purposes."""
    text = "; ".join(f"process {p} is to {t}" for p, t in sorted(purposes.items()))
    return (
        f"processes {names(processes)} are out of step: {text}{where}. Every "
        f"process must make the same communicators in the same order: call "
        f"jaxcomm.init with the same arguments on all of them, before programs "
        f"that only some of them run"
    )


def late(processes: Sequence[int], missing: Sequence[Any], seconds: float) -> str:
    """Return the error of processes that waited for others in vain.

    Args:
      processes: of the set.
      missing: of them; more than :data:`tree.FAN_IN` if there may be more yet.
      seconds: that they waited.
    """
    others = " and perhaps others" if len(missing) > tree.FAN_IN else ""
    return (
        f"waited {seconds:g} s for process{'es' if len(missing) > 1 else ''} "
        f"{', '.join(map(str, missing))}{others} of {names(processes)} to make "
        f"communicators too. Every process of the mesh must call "
        f"jaxcomm.init, or run the program that needs them; see "
        f"JAXCOMM_TIMEOUT"
    )
