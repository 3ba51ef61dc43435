"""Which processes do not come, or come for something else, in words."""

from collections.abc import Mapping, Sequence
from typing import Any

# A message names at most so many processes.
_NAMED = 32


def names(processes: Sequence[int]) -> str:
    """Return the numbers of processes; of many, the first and the last."""
    if len(processes) <= _NAMED:
        return str(list(processes))
    first = ", ".join(map(str, processes[:3]))
    return f"[{first}, ..., {processes[-1]}] ({len(processes)} processes)"


def listed(some: Sequence[int]) -> str:
    """Return "processes 1, 2 and 30 others"."""
    more = len(some) - _NAMED
    return (
        f"process{'es' if len(some) > 1 else ''} {', '.join(map(str, some[:_NAMED]))}"
        f"{f' and {more} others' if more > 0 else ''}"
    )


def disagreement(processes: Sequence[int], came: Mapping[int, Any]) -> str | None:
    """Return the error of processes that came for different purposes, if any did."""
    first: dict[str, int] = {}
    for process, (purpose, _) in came.items():
        first.setdefault(purpose, process)
    if len(first) < 2:
        return None
    return out_of_step(
        processes, {process: purpose for purpose, process in list(first.items())[:2]}
    )


def out_of_step(
    processes: Sequence[int], purposes: Mapping[int, str], where: str = ""
) -> str:
    """Return the error of processes that are to do different things, and where."""
    text = "; ".join(f"process {p} is to {t}" for p, t in sorted(purposes.items()))
    return (
        f"processes {names(processes)} are out of step: {text}{where}. Every process "
        f"must make the same communicators in the same order: call jaxcomm.init with "
        f"the same arguments on all of them, before programs that only some of them run"
    )
