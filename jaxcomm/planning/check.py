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
from jaxcomm.planning.contents import Contents, PlannedCall
from jaxcomm.planning.figure import Figure

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
    def predicted(self) -> Figure:
        """Seconds that the plan says."""
        return self.planned.cost.seconds

    @property
    def ratio(self) -> float | None:
        """Predicted over measured; None if it was not measured."""
        return self.predicted.value / self.measured if self.measured else None

    @property
    def is_good(self) -> bool | None:
        """Whether the ratio is within the bounds of its size; None if not measured."""
        if self.ratio is None:
            return None
        is_large = self.planned.call.bytes >= LARGE
        low, high = _OF_LARGE if is_large else _OF_SMALL
        return low <= self.ratio <= high


class Check(Sequence[CheckedCall]):
    """Predicted beside measured, a row for each collective; prints as a table."""

    def __init__(self, rows: Iterable[CheckedCall]):
        """Hold the rows in the order given."""
        self._rows = tuple(rows)

    def __getitem__(self, index: Any) -> Any:
        """Return one row, or a table of a slice of them."""
        found = self._rows[index]
        return Check(found) if isinstance(index, slice) else found

    def __len__(self) -> int:
        """Count the rows."""
        return len(self._rows)

    @property
    def is_good(self) -> bool:
        """Whether all rows that were measured are good, and some were."""
        known = [row.is_good for row in self._rows if row.is_good is not None]
        return bool(known) and all(known)

    def to_json(self) -> list[dict[str, Any]]:
        """Return it in types that :mod:`json` writes."""
        return [
            {
                "collective": row.planned.call.name,
                "axes": list(row.planned.call.axes),
                "lane": row.planned.call.lane,
                "operands": row.planned.call.operands,
                "bytes": row.planned.call.bytes,
                "count": row.count,
                "seen": row.seen,
                "size": row.size,
                "predicted": row.predicted.value,
                "measured": row.measured,
                "ratio": row.ratio,
                "is_good": row.is_good,
            }
            for row in self._rows
        ]

    def __str__(self) -> str:
        """Draw the table."""
        return table.text(_COLUMNS, map(_cells, self._rows)) + "\n" + _BOUNDS

    __repr__ = __str__

    def _repr_html_(self) -> str:
        drawn = table.as_html(_COLUMNS, map(_cells, self._rows))
        return f"{drawn}<p>{_BOUNDS}</p>"


_BOUNDS = (
    "ratio: predicted / measured. Good: 0.8 to 1.25 from 1 MiB on, 0.5 to 2 below. If "
    "not all ranks are seen, measured includes waiting for the others"
)


def check(plan: Contents, records: Iterable[Any] | None) -> Check:
    """Return predicted beside measured; see :meth:`jaxcomm.planning.Plan.check`."""
    if not plan.calls:
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
    for row in plan.calls:
        call = row.call
        where = str(call.axes), call.lane, call.collective, call.operands
        of_call = found[where] if call.is_ours else []
        rows.append(
            CheckedCall(
                row,
                count=len(of_call),
                seen=min((met.seen for met in of_call), default=0),
                size=max((len(met.group.devices) for met in of_call), default=0),
                measured=statistics.median(met.seconds for met in of_call)
                if of_call
                else None,
            )
        )
    return Check(rows)


def _read(records: Any) -> list[ProcessRecord]:
    if records is None:
        return [flight_record().process]
    if isinstance(records, FlightRecord | ProcessRecord | str | os.PathLike):
        records = [records]
    found = []
    for each in records:
        if isinstance(each, FlightRecord):
            found.append(each.process)
        elif isinstance(each, ProcessRecord):
            found.append(each)
        elif isinstance(each, str | os.PathLike):
            found.append(load(each))
        else:
            raise TypeError(
                f"check: records must be flight records or the names of files that "
                f"hold them, got {each!r}"
            )
    if not found:
        raise ValueError(
            "check: records is empty. Give one flight record of each process, or None "
            "for that of this process"
        )
    return found


def _cells(row: CheckedCall) -> tuple[str, ...]:
    call = row.planned.call
    predicted = f"{table.duration(row.predicted.value)} {row.predicted.origin}"
    cells = (
        *(call.name, " x ".join(call.axes), call.lane, call.operands),
        *(table.size(call.bytes), str(row.count)),
    )
    if row.measured is None:
        why = "XLA keeps no record" if not call.is_ours else "not in the record"
        return (*cells, "0", predicted, why, "", "")
    return (
        *cells,
        f"{row.seen} of {row.size}",
        predicted,
        table.duration(row.measured),
        f"{row.ratio:.2f}",
        "yes" if row.is_good else "NO",
    )
