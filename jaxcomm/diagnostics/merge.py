"""The flight records of all processes side by side: who is behind, and at what."""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxcomm.communicator import text_table as table
from jaxcomm.diagnostics import (
    accounts,
    findings,
    record,
    suspect,
    waits,
)
from jaxcomm.diagnostics.alignment import Group
from jaxcomm.diagnostics.findings import Finding
from jaxcomm.diagnostics.record import ProcessRecord, RecordError
from jaxcomm.diagnostics.seen import Seen
from jaxcomm.diagnostics.suspect import Account

# Frames of this package below or beside those of a program.
_SERVER = '/jaxcomm/communicator/stacks.py"'
_STARTER = '/jaxcomm/launch/child.py"'
# Less is no reason to look for a cause.
_LEAST_WAIT_SECONDS = 0.1
_MOST = 8
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
      seen: what launchers saw of processes, by process.
    """

    records: Mapping[int, ProcessRecord]
    missing: tuple[int, ...]
    groups: Sequence[Group]
    findings: Sequence[Finding]
    skipped: Sequence[str] = ()
    seen: Mapping[int, Seen] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def accounts(self) -> list[Account]:
        """What is known of each process."""
        return accounts.of_processes(
            sorted({*self.records, *self.missing, *self.seen}),
            self.records,
            self.groups,
            self.findings,
            self.seen,
        )

    @property
    def suspect(self) -> str:
        """The line that names who is to blame; empty if nobody is."""
        times = [
            entry.started
            for group in self.groups
            for entries in group.entries.values()
            for entry in entries
        ]
        return suspect.line(self.accounts, max(times) - min(times) if times else 0.0)

    def report(self) -> str:
        """Say who is to blame, what is wrong first, and what the suspects do."""
        if not self.suspect:
            return ""
        parts = [self.suspect]
        for found in self.findings[:1]:
            parts.append(f"{found.title}: group {found.group}: {found.text}")
        for each in suspect.judge(self.accounts):
            parts += self.stacks(each.process)
        return "\n".join(parts)

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
            "suspect": self.suspect,
            "waited_for": [
                {
                    "key": group.communicator.key,
                    "group": group.index,
                    "seconds": waits.by_rank(group),
                }
                for group in self.groups
            ],
        }

    def __str__(self) -> str:
        """Draws the groups in which somebody waits, and says what is wrong."""
        parts = [*([self.suspect] if self.suspect else []), *self._heading(), ""]
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
        parts += self._slow()
        for process in self.records:
            if stacks := self.stacks(process):
                parts += ["", *stacks]
        return "\n".join(parts)

    def stacks(self, process: int) -> list[str]:
        """Return what threads of the program did, without threads of this package."""
        found = self.records.get(process)
        shown = []
        for thread in "\n".join(found.stacks if found else ()).split("\n\n"):
            title, *frames = thread.splitlines() or [""]
            frames = [frame for frame in frames if _STARTER not in frame]
            if frames and _SERVER not in thread:
                shown += [title, *frames]
        return [f"process {process} was at:", *shown] if shown else []

    def _slow(self):
        """Yields whom others waited for, the longest first."""
        found = [
            (seconds, group, rank)
            for group in self.groups
            for rank, seconds in waits.by_rank(group).items()
            if seconds >= _LEAST_WAIT_SECONDS
        ]
        for seconds, group, rank in sorted(found, key=lambda each: -each[0])[:_MOST]:
            yield (
                f"others waited {table.duration(seconds)} for rank {rank} of group "
                f"{group.index} over {group.communicator.title}"
            )

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


def merge(
    records: Iterable[ProcessRecord], by_launchers: Iterable[Seen] = ()
) -> Merged:
    """Compares flight records, one of each process of a job.

    Args:
      records: of the processes.
      by_launchers: what launchers saw of processes.
    """
    by_process = {found.process: found for found in records}
    by_process = dict(sorted(by_process.items()))
    seen_of = {each.process: each for each in by_launchers}
    expected = max([found.processes for found in by_process.values()] + [*seen_of, 0])
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
        seen=seen_of,
    )


def _groups(records, missing):
    process_of = {
        (platform, device): process
        for process, found in records.items()
        for platform, devices in found.devices.items()
        for device in devices
    }
    communicators = {}
    entries = collections.defaultdict(list)
    closed_by = collections.defaultdict(set)
    # If one goes on without a communicator, records of others are older.
    over = {
        communicator.key
        for found in records.values()
        for communicator in found.communicators
        if communicator.closed and _went_on_without(communicator, found)
    }
    for process, found in records.items():
        for communicator in found.communicators:
            if communicator.key in over:
                continue
            if communicator.closed:
                closed_by[communicator.key].add(process)
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
    process_of = _of_missing(communicators.values(), process_of, missing) | process_of
    for key, communicator in communicators.items():
        for index, devices in enumerate(communicator.groups):
            yield Group(
                communicator=communicator,
                index=index,
                process_of={
                    rank: process_of.get((communicator.platform, device))
                    for rank, device in enumerate(devices)
                },
                recorded=records.keys(),
                closed_by=closed_by[key],
                entries={
                    rank: sorted(
                        entries[key, index, rank], key=lambda entry: entry.sequence
                    )
                    for rank in range(len(devices))
                },
            )


def _went_on_without(communicator, found) -> bool:
    """Returns whether a process completed others after a failure in one it closed."""
    failed = [e.started for e in communicator.entries if e.state == record.FAILED]
    return bool(failed) and any(
        entry.state == record.COMPLETED and entry.started > max(failed)
        for other in found.communicators
        for entry in other.entries
    )


def _of_missing(communicators, process_of, missing):
    """Returns whose devices those are that no record claims, if it can be told.

    JAX numbers devices in the order of processes, which have as many each.
    """
    found = {}
    for communicator in communicators:
        platform = communicator.platform
        unclaimed = sorted(
            device
            for group in communicator.groups
            for device in group
            if (platform, device) not in process_of
        )
        count, rest = divmod(len(unclaimed), max(len(missing), 1))
        if missing and count and not rest:
            for i, device in enumerate(unclaimed):
                found[platform, device] = missing[i // count]
    return found
