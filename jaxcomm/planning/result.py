"""What :func:`jaxcomm.plan` returns: a value that prints as tables."""

import dataclasses
import html
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxcomm.communicator import text_table as table
from jaxcomm.machine import Machine
from jaxcomm.planning.calls import PlannedCall
from jaxcomm.planning.communicators import PlannedCommunicator

_COMMUNICATORS = (
    *("mesh axes", "lane", "backend", "groups", "domains", "buffers", "device memory"),
    *("shared memory", "peers"),
)
_CALLS = (
    *("collective", "mesh axes", "lane", "transport", "domains", "operands", "bytes"),
    *("sends", "times"),
)
_SOURCES = "Device memory: as measured on H200s, scaled by formula. Bytes: by formula"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a layout costs; prints as tables, in a notebook as HTML.

    Attributes:
      axes: sizes of the mesh's axes, by name.
      machine: whose numbers the figures are made of.
      processes: how many there are.
      communicators: in the order in which they are made.
      calls: the collectives of a step, each once.
      warnings: what is bad about the plan.
      notes: what is not known of it.

    Example:
      >>> made = jaxcomm.plan({"data": 2, "context": 4}, machine="h200")
      >>> len(made.communicators), made.device_bytes >> 20
      (3, 1086)
      >>> made.to_json()["communicators"][0]["axes"]
      ('data',)
    """

    axes: Mapping[str, int]
    machine: Machine
    processes: int
    communicators: tuple[PlannedCommunicator, ...]
    calls: tuple[PlannedCall, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def device_bytes(self) -> int:
        """Device memory of all communicators, of a rank with most of each."""
        return sum(each.device_bytes for each in self.communicators)

    @property
    def step_bytes(self) -> float:
        """Bytes that the busiest rank sends in a step."""
        return sum(row.times * row.sent_bytes for row in self.calls)

    def to_json(self) -> dict[str, Any]:
        """Return it in types that :mod:`json` writes."""
        return dataclasses.asdict(self) | {
            "device_bytes": self.device_bytes,
            "step_bytes": self.step_bytes,
        }

    def __str__(self) -> str:
        """Draw the tables."""
        lines = [self._heading()]
        for title, columns, rows in self._tables():
            lines += ["", title, table.text(columns, rows)]
        return "\n".join([*lines, "", *self._facts()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [f"<p>{html.escape(self._heading())}</p>"]
        for title, columns, rows in self._tables():
            parts.append(f"<p>{html.escape(title)}</p>{table.as_html(columns, rows)}")
        parts += [f"<p>{html.escape(fact)}</p>" for fact in self._facts()]
        return "".join(parts)

    def _heading(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.axes.items())
        devices = math.prod(self.axes.values())
        return (
            f"{axes}: {devices} devices, {self.processes} processes, domains of "
            f"{self.machine.domain} ({self.machine.source})"
        )

    def _tables(self) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
        if self.communicators:
            rows = [_of_communicator(each) for each in self.communicators]
            yield "communicators, as the rank with most sees them", _COMMUNICATORS, rows
        if self.calls:
            rows = [_of_call(row) for row in self.calls]
            yield "collectives of a step, on one rank", _CALLS, rows

    def _facts(self) -> Iterator[str]:
        if self.calls:
            yield f"a rank sends {table.size(self.step_bytes)} a step"
        if self.communicators:
            yield f"communicators take {_size(self.device_bytes)} of device memory"
        yield from (f"warning: {each}" for each in self.warnings)
        yield from (f"note: {each}" for each in self.notes)
        yield _SOURCES


def _of_communicator(each: PlannedCommunicator) -> tuple[str, ...]:
    return (
        _axes(each.axes, each.index_groups),
        each.lane,
        each.backend,
        ", ".join(f"{of.count} of {of.size}" for of in each.groups),
        str(each.domains),
        ("shared" if each.shares else "own") if each.backend == "nccl" else "-",
        *map(_size, (each.device_bytes, each.shared_bytes)),
        str(each.peers),
    )


def _of_call(row: PlannedCall) -> tuple[str, ...]:
    call = row.call
    return (
        call.name,
        _axes(call.axes, call.index_groups),
        call.lane,
        row.transport,
        str(row.domains),
        call.operands,
        table.size(call.bytes),
        table.size(row.sent_bytes),
        str(row.times),
    )


def _axes(axes, index_groups) -> str:
    text = " x ".join(axes)
    return text if index_groups is None else f"{text} in {len(index_groups)} parts"


def _size(count: int) -> str:
    return table.size(count) if count else "0"
