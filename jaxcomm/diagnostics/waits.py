"""Whom others waited for, in collectives that all completed.

Of ranks that meet, the one that began last was waited for: by each other rank from its
own beginning to that of the last, or to its own end if that was earlier. The first time
at a place of the program is left out: processes compile it, each as long as it takes.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from jaxcomm.diagnostics.alignment import Group, meetings
from jaxcomm.diagnostics.record import COMPLETED, Entry


@dataclasses.dataclass(frozen=True)
class Wait:
    """One meeting to which a rank came last.

    Attributes:
      group: where.
      rank: who came last.
      began: when it came, in seconds since 1970.
      seconds: that the others waited, by rank.
    """

    group: Group
    rank: int
    began: float
    seconds: Mapping[int, float]


def waits(group: Group) -> Iterator[Wait]:
    """Yield those of a group, the first first."""
    known = set()
    for met in meetings(group).values():
        place = min(entry.site for entry in met.values())
        is_first = place not in known
        known.add(place)
        have_completed = all(entry.state == COMPLETED for entry in met.values())
        if not is_first and have_completed and len(met) > 1:
            yield _of(group, met)


def _of(group: Group, met: Mapping[int, Entry]) -> Wait:
    rank, last = max(met.items(), key=lambda item: item[1].started)
    waited = {
        other: max(min(entry.ended or 0.0, last.started) - entry.started, 0.0)
        for other, entry in met.items()
        if other != rank
    }
    return Wait(group, rank, last.started, waited)


def by_rank(group: Group) -> dict[int, float]:
    """Return for each rank of a group the seconds that others waited for it.

    Of several that waited at a time, the longest counts.
    """
    found = dict.fromkeys(group.entries, 0.0)
    for wait in waits(group):
        found[wait.rank] += max(wait.seconds.values())
    return found


def by_process(groups: Iterable[Group]) -> dict[int, float]:
    """Return for each process the seconds that other processes waited for it."""
    found: dict[int, float] = {}
    for group in groups:
        for wait in waits(group):
            process = group.process_of[wait.rank]
            others = [
                seconds
                for rank, seconds in wait.seconds.items()
                if group.process_of[rank] != process
            ]
            if process is not None and others:
                found[process] = found.get(process, 0.0) + max(others)
    return found
