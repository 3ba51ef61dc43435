"""What flight records and launchers tell of each process, as evidence of a suspect."""

from collections.abc import Iterable, Mapping, Sequence

from jaxcomm.diagnostics import waits
from jaxcomm.diagnostics.alignment import Group, meetings
from jaxcomm.diagnostics.findings import BEHIND, MISMATCH, Finding
from jaxcomm.diagnostics.record import (
    COMPLETED,
    FAILED,
    Entry,
    ProcessRecord,
    numbered,
)
from jaxcomm.diagnostics.seen import Seen
from jaxcomm.diagnostics.suspect import Account

# Reasons of records, see extension.py.
_RAISED = "exit after failure"
_LEFT = "exit"


def of_processes(
    processes: Iterable[int],
    records: Mapping[int, ProcessRecord],
    groups: Sequence[Group],
    findings: Sequence[Finding],
    seen: Mapping[int, Seen],
) -> list[Account]:
    """Return an account of each process.

    Args:
      processes: all of the job.
      records: by process.
      groups: of all records together.
      findings: what is wrong in these groups, what began first first.
      seen: what launchers saw, by process.
    """
    # Numbers of operations compare within one group: where the trouble began.
    group_of = {(group.communicator.key, group.index): group for group in groups}
    troubled = [group_of[found.key, found.group] for found in findings]
    ordered = list(dict.fromkeys(map(id, [*troubled, *groups])))
    by_id = {id(group): group for group in groups}
    ordered = [by_id[each] for each in ordered]
    blamed = {kind: _blamed(findings, group_of, kind) for kind in (BEHIND, MISMATCH)}
    late = _came_last(findings, group_of)
    held_up = waits.by_process(groups)
    return [
        _account(
            process,
            records.get(process),
            ordered,
            seen.get(process),
            strayed=blamed[MISMATCH].get(process, ""),
            is_missing=process in blamed[BEHIND],
            came_last=process in late,
            held_up=held_up.get(process, 0.0),
        )
        for process in processes
    ]


def _account(process, record, groups, seen, **blame) -> Account:
    opened = [each for group in groups for each in _open_entries(group, process)]
    now = record.time if record else 0.0
    has_failed = any(entry.state == FAILED for entry in opened)
    reason = record.reason if record else ""
    left = bool(seen and seen.status == 0) or (reason == _LEFT and not has_failed)
    return Account(
        process=process,
        pid=record.pid if record else seen.pid if seen else 0,
        host=record.host if record else seen.host if seen else "",
        has_record=record is not None,
        last=_last(process, groups),
        waits_in=opened[0].numbered if opened else "",
        waited=max((opened[0].ended or now) - opened[0].started, 0) if opened else 0.0,
        has_failed=has_failed,
        raised=reason == _RAISED,
        has_left=left,
        seen=seen,
        **blame,
    )


def _ranks(group, process) -> list[int]:
    return [rank for rank, owner in group.process_of.items() if owner == process]


def _open_entries(group, process) -> list[Entry]:
    """Return what ranks of a process wait in, unless it has closed that."""
    found = [e for rank in _ranks(group, process) for e in group.open_entries(rank)]
    return sorted(found, key=lambda entry: entry.started)


def _last(process, groups) -> str:
    """Return what a process completed last, in the first group that tells."""
    for group in groups:
        ranks = _ranks(group, process)
        done = [group.last_completed(rank) for rank in ranks]
        known = [entry for entry in done if entry is not None]
        if len(known) == len(ranks) > 0:
            return min(known, key=lambda entry: entry.sequence).numbered
        is_silent = not any(group.entries[rank] for rank in ranks)
        if ranks and is_silent and (told := _told(group)):
            return told.numbered
    return ""


def _told(group) -> Entry | None:
    """Return what all who left a record completed last together.

    Who left none took part in it.
    """
    recorded = {rank for rank, entries in group.entries.items() if entries}
    found = None
    for met in meetings(group).values():
        if recorded <= met.keys() and all(e.state == COMPLETED for e in met.values()):
            found = max(met.values(), key=lambda entry: entry.sequence)
    return found


def _blamed(findings, group_of, kind) -> dict[int, str]:
    """Return what processes did, by process, that findings of a kind accuse."""
    found: dict[int, str] = {}
    for finding in findings:
        if finding.kind == kind:
            group = group_of[finding.key, finding.group]
            for rank in (*finding.ranks, *finding.rivals):
                process = group.process_of[rank]
                if process is not None:
                    found.setdefault(process, _does(group, rank))
    return found


def _does(group, rank) -> str:
    entries = group.open_entries(rank)
    if not entries:
        return "came to nothing"
    entry = entries[0]
    what = numbered(entry.operation, entry.sequence, entry.where)
    return f"came to {what} instead"


def _came_last(findings, group_of) -> set[int | None]:
    """Return the processes that came to a collective that had failed meanwhile."""
    found = set()
    for finding in findings:
        if finding.kind in (BEHIND, MISMATCH):
            continue
        group = group_of[finding.key, finding.group]
        opened = [e for rank in group.entries for e in group.open_entries(rank)]
        if any(entry.state == FAILED for entry in opened):
            found |= {group.process_of[rank] for rank in finding.ranks}
    return found
