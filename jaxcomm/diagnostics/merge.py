"""The flight records of all processes side by side: who is behind, and at what."""

import collections
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxcomm.communicator import text_table as table
from jaxcomm.diagnostics import findings, record
from jaxcomm.diagnostics.alignment import Group
from jaxcomm.diagnostics.findings import Finding
from jaxcomm.diagnostics.record import ProcessRecord, RecordError

_COLUMNS = ("group", "rank", "process", "device", "last completed", "now", "for")


@dataclasses.dataclass(frozen=True)
class Merged:
    """What the records of several processes say together; prints as tables.

    Attributes:
      records: by process.
      missing: processes of which there is no record.
      groups: every group of every communicator.
      findings: what is wrong, what began first first. Empty if nobody waits.
      skipped: why files were left out, each sentence with the name of its file.
    """

    records: Mapping[int, ProcessRecord]
    missing: tuple[int, ...]
    groups: Sequence[Group]
    findings: Sequence[Finding]
    skipped: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns it without groups, in types that json writes."""
        return {
            "processes": {
                str(process): {
                    "pid": found.pid,
                    "host": found.host,
                    "time": found.time,
                    "reason": found.reason,
                }
                for process, found in self.records.items()
            },
            "missing": list(self.missing),
            "skipped": list(self.skipped),
            "findings": [dataclasses.asdict(found) for found in self.findings],
        }

    def __str__(self) -> str:
        """Draws the groups in which somebody waits, and says what is wrong."""
        parts = [*self._heading(), ""]
        # One table a communicator, with the groups that are in trouble.
        troubled = {(found.key, found.group) for found in self.findings}
        by_communicator = collections.defaultdict(list)
        for group in self.groups:
            if (group.communicator.key, group.index) in troubled:
                by_communicator[group.communicator.key].append(group)
        for groups in by_communicator.values():
            rows = [row for group in groups for row in self._rows(group)]
            parts += [groups[0].communicator.title, table.text(_COLUMNS, rows), ""]
        if not self.findings:
            parts.append(self._all_well())
        title = None
        for found in self.findings:
            if found.title != title:
                title = found.title
                parts.append(f"{title}:")
            parts.append(f"  group {found.group}: {found.text}")
        return "\n".join(parts)

    def _heading(self):
        expected = max(found.processes for found in self.records.values())
        written = collections.defaultdict(list)
        for process, found in self.records.items():
            written[found.reason].append(process)
        listed = "; ".join(
            f"{reason}: {table.numbers(processes)}"
            for reason, processes in written.items()
        )
        yield (
            f"flight records of {len(self.records)} of {expected} processes ({listed})"
        )
        yield from (f"left out: {each}" for each in self.skipped)
        older, newer = self._strangers()
        if older is not None:
            yield (
                f"process {older} wrote its record before process {newer} began: if "
                f"they are of different jobs, leave the older one out"
            )
        if self.missing:
            several = len(self.missing) > 1
            yield (
                f"no record of process{'es' if several else ''} "
                f"{table.numbers(self.missing)}: killed, still computing, or without "
                f"JAXCOMM_DUMP_DIR"
            )

    def _strangers(self):
        """Returns who wrote a record before another began, by one host's clock."""
        for older, early in self.records.items():
            for newer, late in self.records.items():
                began = late.began if early.host == late.host else None
                if began is not None and early.time < began:
                    return older, newer
        return None, None

    def _last_time(self):
        return max(found.time for found in self.records.values())

    def _all_well(self):
        entries = [
            entry
            for group in self.groups
            for of_rank in group.entries.values()
            for entry in of_rank
        ]
        if not entries:
            return "No operation was recorded."
        failed = sum(entry.state == record.FAILED for entry in entries)
        return (
            f"Nobody waits. {len(entries)} operations are on record; {failed} failed "
            f"before the program went on."
        )

    def _rows(self, group):
        for rank, device in enumerate(group.devices):
            process = group.process_of[rank]
            done = group.last_completed(rank)
            waiting = group.open_entries(rank)
            now, since = "", ""
            if waiting:
                entry = waiting[0]
                now = f"{entry.state} {entry.operation} #{entry.sequence}"
                until = entry.ended
                if until is None:
                    # A record that names no platform does not say whose the rank is.
                    known = self.records.get(process)
                    until = known.time if known else self._last_time()
                since = table.duration(max(until - entry.started, 0))
            yield (
                str(group.index),
                str(rank),
                "?" if process is None else str(process),
                f"{group.communicator.platform or 'device'}:{device}",
                f"{done.operation} #{done.sequence}" if done else "",
                now if process in self.records else "no record",
                since,
            )


def merge_files(paths: Iterable[str | os.PathLike]) -> Merged:
    """Compares flight records, one file of each process.

    A file that is no flight record is left out, and named in ``skipped``.

    Args:
      paths: files that failures, SIGUSR1 or ``FlightRecord.save`` wrote.

    Raises:
      RecordError: no file is a flight record, or they are not of one job.

    Example:
      >>> merge_files(sorted(folder.glob("flight-record-*.json")))  # doctest: +SKIP
    """
    path_of: dict[int, str] = {}
    records: dict[int, ProcessRecord] = {}
    skipped: list[str] = []
    for path in paths:
        try:
            found = record.load(path)
        except RecordError as error:
            skipped.append(str(error))
            continue
        name = table.plain(os.fspath(path))
        if found.process in records:
            raise RecordError(
                f"{path_of[found.process]} and {name} are both of process "
                f"{found.process}; give one record of each process"
            )
        for process, other in records.items():
            if other.processes != found.processes:
                raise RecordError(
                    f"{name} is of a job of {found.processes} processes and "
                    f"{path_of[process]} of one of {other.processes}; give the records "
                    f"of one job"
                )
        path_of[found.process] = name
        records[found.process] = found
    if not records:
        raise RecordError("; ".join(skipped) or "no flight record was given")
    return dataclasses.replace(merge(records.values()), skipped=skipped)


def merge(records: Iterable[ProcessRecord]) -> Merged:
    """Compares flight records, one of each process of a job."""
    by_process = {found.process: found for found in records}
    by_process = dict(sorted(by_process.items()))
    expected = max(found.processes for found in by_process.values())
    missing = tuple(sorted(set(range(expected)) - set(by_process)))
    groups = list(_groups(by_process, missing))
    elsewhere = collections.defaultdict(list)
    for group in groups:
        for rank, device in enumerate(group.devices):
            for entry in group.open_entries(rank):
                elsewhere[group.communicator.platform, device].append((group, entry))
    found = [
        finding for group in groups for finding in findings.of_group(group, elsewhere)
    ]
    return Merged(
        records=by_process,
        missing=missing,
        groups=groups,
        findings=sorted(found, key=lambda finding: finding.since),
    )


def _groups(records, missing):
    # Devices that no record claims are the missing process's, if there is but one.
    unclaimed = missing[0] if len(missing) == 1 else None
    process_of = {
        (platform, device): process
        for process, found in records.items()
        for platform, devices in found.devices.items()
        for device in devices
    }
    communicators = {}
    entries = collections.defaultdict(list)
    for process, found in records.items():
        for communicator in found.communicators:
            known = communicators.setdefault(communicator.key, communicator)
            if known.groups != communicator.groups:
                raise RecordError(
                    f"the records of processes disagree on the groups of "
                    f"{communicator.title} ({communicator.key}): they are of "
                    f"different jobs"
                )
            for entry in communicator.entries:
                entries[communicator.key, entry.group, entry.rank].append(entry)
                process_of[communicator.platform, entry.device] = process
    for key, communicator in communicators.items():
        for index, devices in enumerate(communicator.groups):
            yield Group(
                communicator=communicator,
                index=index,
                process_of={
                    rank: process_of.get((communicator.platform, device), unclaimed)
                    for rank, device in enumerate(devices)
                },
                recorded=records.keys(),
                entries={
                    rank: sorted(
                        entries[key, index, rank], key=lambda entry: entry.sequence
                    )
                    for rank in range(len(devices))
                },
            )
