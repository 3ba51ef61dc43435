"""Which entries of different ranks are the same operation.

Ranks meet by run and place in the program, and the n-th time at a place meets the n-th
time of the others; not by order, for a rank may enter independent operations in any.
Sequence numbers serve where the ring has forgotten the beginning of a run, and for
NCCL, to which every rank gives its operations in one order.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence, Set

from jaxcomm.communicator import backends
from jaxcomm.diagnostics.record import (
    COMPLETED,
    FAILED,
    STARTED,
    CommunicatorRecord,
    Entry,
)

# (run, site, how many-th time), or (0, "", sequence): equal on ranks that meet.
Meeting = tuple[int, str, int]


@dataclasses.dataclass(frozen=True)
class Group:
    """One group of a communicator, as all dumps together show it.

    Attributes:
      communicator: as one of the dumps describes it; its entries are that dump's.
      index: which of its groups.
      process_of: by rank; None if no dump tells.
      recorded: processes of which there is a dump.
      entries: by rank, in the order of their sequence numbers.
      closed_by: processes that have closed the communicator.
    """

    communicator: CommunicatorRecord
    index: int
    process_of: Mapping[int, int | None]
    recorded: Set[int]
    entries: Mapping[int, Sequence[Entry]]
    closed_by: Set[int] = frozenset()

    @property
    def devices(self) -> tuple[int, ...]:
        """Global device ids, in rank order."""
        return self.communicator.groups[self.index]

    def is_closed(self, rank: int) -> bool:
        """Returns whether the process of a rank has closed the communicator."""
        return self.process_of[rank] in self.closed_by

    def last_completed(self, rank: int) -> Entry | None:
        """Returns what a rank completed last, None if nothing is known."""
        done = [entry for entry in self.entries[rank] if entry.state == COMPLETED]
        return done[-1] if done else None

    def open_entries(self, rank: int) -> list[Entry]:
        """Returns what a rank waits in, or failed in without going on since."""
        entries = self.entries[rank]
        done = self.last_completed(rank)
        since = done.sequence if done else 0
        return [
            entry
            for entry in entries
            if entry.state == STARTED
            or (entry.state == FAILED and entry.sequence > since)
        ]


def meetings(group: Group) -> dict[Meeting, dict[int, Entry]]:
    """Returns the entries of each meeting by rank, in the order they started."""
    first_counted = _first_counted(group)
    is_ordered = backends.orders_lanes(group.communicator.backend)
    found: dict[Meeting, dict[int, Entry]] = {}
    for rank, entries in group.entries.items():
        times: collections.Counter = collections.Counter()
        for entry in entries:
            place = entry.run_id, entry.site
            if is_ordered:
                found.setdefault((0, "", entry.sequence), {})[rank] = entry
            elif entry.sequence >= first_counted.get(entry.run_id, 0):
                times[place] += 1
                found.setdefault((*place, times[place]), {})[rank] = entry
    return dict(
        sorted(
            found.items(),
            key=lambda item: min(entry.started for entry in item[1].values()),
        )
    )


def _first_counted(group) -> dict[int, int]:
    """Returns from which sequence number on to count, by run; from the first if absent.

    Only for runs whose beginning some ring has forgotten: there no rank may count what
    another cannot.
    """
    forgotten: dict[int, int] = {}
    for entries in group.entries.values():
        if entries and entries[0].sequence > 1:
            oldest = entries[0]
            known = forgotten.get(oldest.run_id, 0)
            forgotten[oldest.run_id] = max(known, oldest.sequence)
    return forgotten
