"""The flight record of this process: what each rank did last, and waits in now."""

import html
import json
import os
from collections.abc import Iterator
from typing import Any

from jaxcomm._built import ABSENCE, _ffi
from jaxcomm.communicator import text_table as table
from jaxcomm.communicator.communicator import Communicator
from jaxcomm.diagnostics import perfetto, record
from jaxcomm.diagnostics.merge import merge
from jaxcomm.errors import CommunicatorError

# Of each communicator, beside what has not ended: a screen, not a log.
_ROWS_SHOWN = 20
_COLUMNS = ("#", "group", "ranks", "operation", "bytes", "state", "started", "took")


class FlightRecord:
    """The last operations of this process's communicators, at one moment.

    Prints as a table, in a notebook as HTML; ranks that did the same share a row.

    Attributes:
      process: everything in it, a :class:`~jaxcomm.diagnostics.record.ProcessRecord`.
    """

    def __init__(self, document: str):
        """Reads what the extension wrote."""
        self._document = document
        self.process = record.parse(json.loads(document))

    def to_json(self) -> dict[str, Any]:
        """Returns it in types that :mod:`json` writes.

        The format is described in :mod:`jaxcomm.diagnostics.record`.
        """
        return json.loads(self._document)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it as JSON, for ``python -m jaxcomm.doctor --merge``."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self._document)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write what the ranks did, for https://ui.perfetto.dev to open.

        Each rank of each communicator has a track. For records of several processes
        see ``python -m jaxcomm.doctor --merge``.

        Raises:
          OSError: if the file cannot be written.
          ValueError: if no operation is on record.

        Example:
          >>> jaxcomm.flight_record().save_trace("trace.json")  # doctest: +SKIP
        """
        perfetto.save(merge([self.process]), path)

    def __str__(self) -> str:
        """Draws a table for each communicator."""
        parts = [self._heading()]
        for communicator in self.process.communicators:
            rows, hidden = _rows(communicator, self.process.time)
            parts.append("")
            parts.append(_subheading(communicator))
            parts.append(table.text(_COLUMNS, rows) if rows else "  no operation yet")
            if hidden:
                parts.append(_hidden(hidden))
        return "\n".join(parts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [f"<p>{html.escape(self._heading())}</p>"]
        for communicator in self.process.communicators:
            rows, hidden = _rows(communicator, self.process.time)
            parts.append(f"<p>{html.escape(_subheading(communicator))}</p>")
            parts.append(table.as_html(_COLUMNS, rows))
            if hidden:
                parts.append(f"<p>{html.escape(_hidden(hidden))}</p>")
        return "".join(parts)

    def _heading(self):
        process = self.process
        what = (
            f"flight record of process {process.process} of {process.processes} "
            f"(pid {process.pid}, {process.host}) at {table.clock(process.time)}"
        )
        if not process.communicators:
            what += ": no communicator of jaxcomm's own is live"
        return what


def flight_record(communicator: Communicator | None = None) -> FlightRecord:
    """Returns the last operations of this process's ranks, 1024 for each communicator.

    Recording is always on and costs some ten nanoseconds an operation. The same record
    is written to ``$JAXCOMM_DUMP_DIR/flight-record-<process>.json`` when a collective
    fails, when the program ends by an exception, and on SIGUSR1, which a process also
    answers while it hangs; without that variable SIGUSR1 prints a line for each rank
    to stderr. A handler or disposition that the program itself sets for SIGUSR1 is
    left alone.

    Args:
      communicator: of :func:`jaxcomm.communicators`. If None, all that are live.

    Returns:
      A :class:`~jaxcomm.diagnostics.flight_record.FlightRecord`, which prints as a
      table.

    Raises:
      CommunicatorError: the communicator is closed, or there is no extension here.
      TypeError: it is no communicator.
      ValueError: its backend is ``"xla"``, whose operations only XLA sees.

    Example:
      >>> jaxcomm.flight_record()  # doctest: +SKIP
      flight record of process 0 of 1 (pid 4711, node7) at 12:00:00.512
      <BLANKLINE>
      axes ('i',), lane 'default', backend host, 1 group of 4
      #   group  ranks    operation         bytes  state      started       took
      --  -----  -------  ----------------  -----  ---------  ------------  -------
      41  0      0-3      psum(float32[1])  4 B    completed  11:59:58.001  52.1 us
      42  0      0, 1, 3  psum(float32[1])  4 B    started    11:59:58.204  2.31 s
    """
    key = None
    if communicator is not None:
        if not isinstance(communicator, Communicator):
            raise TypeError(
                f"flight_record: communicator must be one of jaxcomm.communicators(), "
                f"or None for all, got a {type(communicator).__name__}. Pass for "
                f"example jaxcomm.communicators()[0]."
            )
        if not communicator.is_ours:
            raise ValueError(
                f"flight_record: {communicator!r} keeps no record, for its operations "
                f"run inside XLA; use backend 'host', or leave the argument out"
            )
        if communicator.closed:
            raise CommunicatorError(
                f"flight_record: {communicator!r} is closed and its record gone; ask "
                f"before close(), or set JAXCOMM_DUMP_DIR to have failures written"
            )
        key = communicator.key
    if ABSENCE:
        raise CommunicatorError(
            f"flight_record: XLA keeps none; use jax.profiler. Else: {ABSENCE}"
        )
    return FlightRecord(_ffi.flight_record(key, "asked"))


def _subheading(communicator):
    sizes = sorted({len(group) for group in communicator.groups})
    groups = len(communicator.groups)
    return (
        f"{communicator.title}, backend {communicator.backend}, {groups} "
        f"group{'s' if groups > 1 else ''} of {' or '.join(map(str, sizes))}"
    )


def _hidden(count):
    return f"  ({count} earlier rows: see to_json())"


def _rows(communicator, now) -> tuple[list[tuple[str, ...]], int]:
    """Returns the rows to show, and how many are not."""
    shared: dict[tuple, list[record.Entry]] = {}
    for entry in communicator.entries:
        what = (entry.group, entry.sequence, entry.site, entry.operation, entry.state)
        shared.setdefault(what, []).append(entry)
    rows = list(shared.values())
    shown = [
        entries
        for i, entries in enumerate(rows)
        if i >= len(rows) - _ROWS_SHOWN or entries[0].state == record.STARTED
    ]
    return [tuple(_cells(entries, now)) for entries in shown], len(rows) - len(shown)


def _cells(entries, now) -> Iterator[str]:
    first = entries[0]
    yield str(first.sequence)
    yield str(first.group)
    yield table.numbers(entry.rank for entry in entries)
    yield first.operation
    yield table.size(first.bytes)
    yield first.state
    yield table.clock(first.started)
    yield table.duration(max((entry.ended or now) - entry.started for entry in entries))
