"""How long collectives took, by flight records: from the last arrival to the end."""

import dataclasses
from collections.abc import Iterable, Iterator

from jaxcomm.diagnostics.alignment import Group, meetings
from jaxcomm.diagnostics.merge import merge
from jaxcomm.diagnostics.record import COMPLETED, Entry, ProcessRecord


@dataclasses.dataclass(frozen=True)
class Timed:
    """One collective of one group.

    Attributes:
      group: whose ranks took part.
      entry: what one of the ranks did.
      seconds: from the arrival of the last known rank to the end of the last.
      seen: ranks that are known. If not all are, ``seconds`` includes waiting.
    """

    group: Group
    entry: Entry
    seconds: float
    seen: int


def timed(records: Iterable[ProcessRecord]) -> Iterator[Timed]:
    """Yield the collectives that all known ranks completed, oldest first by group.

    Args:
      records: of the processes of one job, each once.

    Raises:
      RecordError: they are not of one job.
    """
    for group in merge(records).groups:
        known = sum(map(bool, group.entries.values()))
        for met in meetings(group).values():
            found = list(met.values())
            is_done = all(entry.state == COMPLETED for entry in found)
            if not is_done or len(found) < known:
                continue
            came = max(entry.started for entry in found)
            left = max(entry.ended or 0 for entry in found)
            # Points in time are rounded to a quarter of a microsecond, durations not.
            least = min(entry.seconds or 0 for entry in found)
            yield Timed(group, found[0], max(left - came, least), len(found))
