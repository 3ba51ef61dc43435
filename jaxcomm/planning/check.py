"""Holds a plan to what was measured: predicted beside measured, by flight records."""

import collections
import dataclasses
import os
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from jaxcomm.diagnostics import table
from jaxcomm.diagnostics.flight_record import FlightRecord, flight_record
from jaxcomm.diagnostics.record import ProcessRecord, load
from jaxcomm.diagnostics.timing import Timed, timed
from jaxcomm.planning.calls import PlannedCall

# A prediction is good if predicted / measured lies within: from these bytes on, below.
LARGE = 1 << 20
_OF_LARGE, _OF_SMALL = (0.8, 1.25), (0.5, 2.0)
_COLUMNS = (
    *("collective", "mesh axes", "lane", "operands", "bytes", "calls", "ranks seen"),
    *("predicted", "measured", "ratio", "good"),
)


@dataclasses.dataclass(frozen=True)
class CheckedCall:
    """One collective, predicted and measured.

    Attributes:
      planned: what the plan says.
      count: how often it was measured; 0 if never.
      seen: ranks of a group whose records are there.
      size: ranks of a group.
      measured: median seconds, from the last arrival to the end; None if never.
    """

    planned: PlannedCall
    count: int
    seen: int
    size: int
    measured: float | None

    @property
    def predicted(self) -> float | None:
        """Seconds that the plan says, if it does."""
        return self.planned.seconds

    @property
    def ratio(self) -> float | None:
        """Predicted over measured; None without one of them."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured

    @property
    def is_good(self) -> bool | None:
        """Whether the ratio is within the bounds of its size; None without a ratio."""
        if self.ratio is None:
            return None
        is_large = self.planned.call.bytes >= LARGE
        low, high = _OF_LARGE if is_large else _OF_SMALL
        return low <= self.ratio <= high


class Check(tuple[CheckedCall, ...]):
    """Predicted beside measured, a row for each collective; prints as a table."""

    @property
    def is_good(self) -> bool:
        """Whether all rows that have a ratio are good, and some have one."""
        known = [row.is_good for row in self if row.is_good is not None]
        return bool(known) and all(known)

    def __str__(self) -> str:
        """Draw the table."""
        return table.text(_COLUMNS, map(_cells, self)) + "\n" + _BOUNDS

    __repr__ = __str__

    def _repr_html_(self) -> str:
        drawn = table.as_html(_COLUMNS, map(_cells, self))
        return f"{drawn}<p>{_BOUNDS}</p>"


_BOUNDS = (
    "ratio: predicted / measured. Good: 0.8 to 1.25 from 1 MiB on, 0.5 to 2 below. If "
    "not all ranks are seen, measured includes waiting for the others"
)


def check(calls: Sequence[PlannedCall], records: Iterable[Any] | None) -> Check:
    """Return predicted beside measured; see :meth:`jaxcomm.planning.Plan.check`."""
    if not calls:
        raise ValueError(
            "check: the plan has no collectives to compare. Give jaxcomm.plan the "
            "function that ran, with the shapes of its arguments"
        )
    found: dict[tuple, list[Timed]] = collections.defaultdict(list)
    for met in timed(_read(records)):
        entry, communicator = met.entry, met.group.communicator
        where = communicator.axes, communicator.lane, entry.collective, entry.operands
        found[where].append(met)
    rows = []
    for row in calls:
        call = row.call
        where = str(call.axes), call.lane, call.collective, call.operands
        took = found[where] if call.is_ours else []
        seen = min((each.seen for each in took), default=0)
        size = max((len(each.group.devices) for each in took), default=0)
        seconds = statistics.median(each.seconds for each in took) if took else None
        rows.append(CheckedCall(row, len(took), seen, size, seconds))
    return Check(rows)


def _read(records: Any) -> list[ProcessRecord]:
    if records is None:
        return [flight_record().process]
    if isinstance(records, FlightRecord | ProcessRecord | str | os.PathLike):
        records = [records]
    found = [_record(each) for each in records]
    if not found:
        raise ValueError(
            "check: records is empty. Give one flight record of each process, or None "
            "for that of this process"
        )
    return found


def _record(given: Any) -> ProcessRecord:
    if isinstance(given, FlightRecord):
        return given.process
    if isinstance(given, ProcessRecord):
        return given
    if isinstance(given, str | os.PathLike):
        return load(given)
    raise TypeError(
        f"check: records must be flight records or the names of files that hold them, "
        f"got {given!r}"
    )


def _cells(row: CheckedCall) -> tuple[str, ...]:
    call = row.planned.call
    measured, ratio, good = "not in the record", "", ""
    if not call.is_ours:
        measured = "XLA keeps no record"
    elif row.measured is not None:
        measured = table.duration(row.measured)
    if row.ratio is not None:
        ratio, good = f"{row.ratio:.2f}", "yes" if row.is_good else "NO"
    return (
        *(call.name, " x ".join(call.axes), call.lane, call.operands),
        *(table.size(call.bytes), str(row.count)),
        f"{row.seen} of {row.size}" if row.count else "0",
        "no samples" if row.predicted is None else table.duration(row.predicted),
        *(measured, ratio, good),
    )
