"""Flight records as bars on a common time axis, for pictures and trace viewers."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from jaxcomm.diagnostics import clocks
from jaxcomm.diagnostics.alignment import meetings
from jaxcomm.diagnostics.merge import Merged
from jaxcomm.diagnostics.record import CommunicatorRecord, Entry

# Times are rounded to a quarter of a microsecond: bars that touch may seem to overlap.
_TOUCHING = 1e-6


@dataclasses.dataclass(frozen=True)
class Bar:
    """One operation of one rank.

    Attributes:
      process: index of the process.
      communicator: what it ran on.
      entry: what was recorded.
      start: when it began, in seconds since 1970 by the clock of the first host.
      end: when it ended, or when the record of an operation that has not was written.
    """

    process: int
    communicator: CommunicatorRecord
    entry: Entry
    start: float
    end: float

    @property
    def device(self) -> tuple[str, int]:
        """Platform and global id of the device: one row of a picture."""
        return self.communicator.platform or "device", self.entry.device


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What the ranks of some processes did.

    Attributes:
      bars: by device, then oldest first.
      together: the bars of each operation, one a rank, what began first first. Bars
        are missing of which other ranks have forgotten the counterpart.
      corrections: seconds added to the times of each host, as its clock was wrong.
    """

    bars: Sequence[Bar]
    together: Sequence[Sequence[Bar]]
    corrections: Mapping[str, float]

    @functools.cached_property
    def start(self) -> float:
        """When the first operation began, in seconds since 1970."""
        return min(bar.start for bar in self.bars)

    @functools.cached_property
    def end(self) -> float:
        """When the last one ended, in seconds since 1970."""
        return max(bar.end for bar in self.bars)


def timeline(merged: Merged) -> Timeline:
    """Place the operations of flight records on one time axis.

    Raises:
      ValueError: if no operation is on record.
    """
    shift = clocks.corrections(merged.records, merged.groups)
    bar_of = {}
    for process, record in merged.records.items():
        by = shift[record.host]
        for communicator in record.communicators:
            for entry in communicator.entries:
                end = record.time if entry.ended is None else entry.ended
                start = entry.started + by
                bar_of[id(entry)] = Bar(
                    process, communicator, entry, start, max(start, end + by)
                )
    if not bar_of:
        raise ValueError(
            "flight record: no operation is on record, so there is nothing to show. "
            "Run a program with collectives first; those of backend 'xla' are not "
            "recorded."
        )
    return Timeline(
        sorted(bar_of.values(), key=lambda bar: (bar.device, bar.start, bar.end)),
        sorted(
            (
                [bar_of[id(entry)] for entry in met.values()]
                for group in merged.groups
                for met in meetings(group).values()
            ),
            key=lambda bars: min(bar.start for bar in bars),
        ),
        shift,
    )


Row = TypeVar("Row", bound=Hashable)


def rows(bars: Iterable[Bar], key: Callable[[Bar], Row]) -> dict[Row, list[list[Bar]]]:
    """Return the bars of each row, in as many levels as keep them from overlapping.

    Args:
      bars: oldest first within a row.
      key: which row a bar is in.

    Returns:
      Levels by row; a bar is in the first level that is free when it starts.
    """
    found: dict[Row, list[list[Bar]]] = {}
    for bar in bars:
        levels = found.setdefault(key(bar), [])
        for level in levels:
            if level[-1].end <= bar.start + _TOUCHING:
                level.append(bar)
                break
        else:
            levels.append([bar])
    return found
