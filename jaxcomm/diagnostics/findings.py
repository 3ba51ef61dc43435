"""What keeps a group from going on, in sentences that name ranks and operations."""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jaxcomm.communicator import text_table as table
from jaxcomm.diagnostics import habits
from jaxcomm.diagnostics.alignment import Group, Meeting, meetings
from jaxcomm.diagnostics.record import FAILED, STARTED, Entry

BEHIND = "behind"
MISMATCH = "mismatch"
SLOW = "slow"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
      kind: ``"behind"`` (ranks did not come), ``"mismatch"`` (ranks did different
        things) or ``"slow"`` (all came; bytes were moving, or the last came late, or
        the records are of different moments).
      title: which communicator.
      key: of the communicator.
      group: which of its groups.
      ranks: whose fault it is, as far as the records tell.
      since: when the first of the others came, in seconds since 1970.
      text: a sentence.
      rivals: ranks whose fault it is just as likely.
    """

    kind: str
    title: str
    key: str
    group: int
    ranks: tuple[int, ...]
    since: float
    text: str
    rivals: tuple[int, ...] = ()


# Where else a device waits: (communicator's title, entry) by platform and device.
Elsewhere = Mapping[tuple[str, int], Sequence[tuple[Group, Entry]]]


def of_group(group: Group, elsewhere: Elsewhere) -> Iterator[Finding]:
    """Yields what keeps a group from going on, what began first first."""
    together = meetings(group)
    waiting = {rank: group.open_entries(rank) for rank in group.entries}
    still_open = {
        meeting: entries
        for meeting, entries in together.items()
        if any(entry in waiting[rank] for rank, entry in entries.items())
    }
    explained: set[Meeting] = set()
    for meeting, entries in still_open.items():
        if meeting in explained:
            continue
        others = _at_another_place(group, meeting, still_open)
        if others:
            explained.update(others)
            parties = [entries, *(still_open[other] for other in others)]
            yield _mismatch(group, parties)
        elif len(_signatures(entries.values())) > 1:
            yield _mismatch(group, _by_signature(entries))
        elif len(entries) < len(group.devices):
            yield _behind(group, entries, waiting, elsewhere)
        else:
            yield _slow(group, entries)


def _at_another_place(group, meeting, still_open) -> list[Meeting]:
    """Returns the open meetings to which ranks that this one lacks went instead.

    Not those that share a rank with it: ranks may come to independent operations in
    any order, and to several at a time.
    """
    here = still_open[meeting].keys()
    return [
        other
        for other, there in still_open.items()
        if other != meeting and not here & there.keys()
    ]


def _signatures(entries: Iterable[Entry]) -> set:
    return {(entry.collective, entry.operation, entry.signature) for entry in entries}


def _by_signature(entries) -> list[dict[int, Entry]]:
    parties = collections.defaultdict(dict)
    for rank, entry in entries.items():
        (signature,) = _signatures([entry])
        parties[signature][rank] = entry
    return list(parties.values())


def _mismatch(group, parties) -> Finding:
    # The fewest are the odd ones; among equals the later, then those without rank 0.
    first_come = min(_since(party) for party in parties)
    *odd, most = sorted(
        parties, key=lambda party: (len(party), -_since(party), -min(party))
    )
    sentences = []
    for party in odd:
        what, rest = _first(party), _first(most)
        where = f"at #{what.sequence} " if what.sequence == rest.sequence else ""
        counted = "" if where else f" as #{what.sequence}"
        counted_rest = "" if where else f" as #{rest.sequence}"
        sentences.append(
            f"{where}{_ranks(group, party)} ran {what.operation}{counted} where "
            f"{_ranks(group, most)} ran {rest.operation}{counted_rest}"
            f"{_difference(what, rest)}"
        )
    blamed = sorted(rank for party in odd for rank in party)
    rivals = most if len(most) == max(map(len, odd)) else ()
    if rivals:
        broke, habit = habits.broken_by(group, parties)
        if broke:
            blamed, rivals = broke, ()
            sentences.append(habit)
    found = _finding(MISMATCH, group, blamed, first_come, "; ".join(sentences))
    return dataclasses.replace(found, rivals=tuple(sorted(rivals)))


def _difference(one, other):
    if one.operation != other.operation:
        return ""
    if one.signature != other.signature:
        return " with other parameters or results"
    if one.run_id != other.run_id:
        return " in another launch of a program"
    return " at another place of the program"


def _behind(group, entries, waiting, elsewhere) -> Finding:
    missing = [rank for rank in range(len(group.devices)) if rank not in entries]
    # A pairwise operation may be over for some of those that came.
    left = {rank: entry for rank, entry in entries.items() if entry in waiting[rank]}
    what = _first(left)
    verb = "gave up" if what.state == FAILED else "wait" if len(left) > 1 else "waits"
    where = f"{_ranks(group, left)} {verb} in {what.operation} #{what.sequence}"
    # A ring that has forgotten the operation is of a rank that went on for long.
    stayed = [rank for rank in missing if not _is_forgotten(group, rank, what)]
    if not stayed:
        text = (
            f"{where}, and {_ranks(group, missing)} went on before their record was "
            f"written: the records are of different moments"
        )
        return _finding(SLOW, group, (), _since(left), text)
    missing = stayed
    # Silent ranks of one process share a clause.
    clauses = collections.defaultdict(list)
    for rank in missing:
        clauses[_standing(group, rank, waiting[rank], elsewhere)].append(rank)
    who = "; ".join(
        f"{_ranks(group, ranks)} {standing}" for standing, ranks in clauses.items()
    )
    return _finding(BEHIND, group, missing, _since(left), f"{who}; {where}")


def _is_forgotten(group, rank, entry) -> bool:
    """Return whether all that is known of a rank comes after an operation."""
    entries = group.entries[rank]
    return bool(entries) and entries[0].sequence > entry.sequence


def _standing(group, rank, waiting, elsewhere):
    """Says in a clause what a rank that did not come did instead."""
    if group.process_of[rank] not in group.recorded:
        return "left no record"
    done = group.last_completed(rank)
    if waiting:
        clause = f"came to {waiting[0].operation} #{waiting[0].sequence} instead"
    elif done:
        clause = f"last completed {done.operation} #{done.sequence}"
    else:
        clause = "never used this communicator"
    if group.is_closed(rank):
        clause += ", and closed the communicator"
    device = group.communicator.platform, group.devices[rank]
    for other, entry in elsewhere.get(device, ()):
        if other is not group and entry.state == STARTED:
            clause += (
                f", now in {entry.operation} #{entry.sequence} of "
                f"{other.communicator.title}"
            )
            break
    return clause


def _slow(group, entries) -> Finding:
    what = _first(entries)
    latest = max(entry.started for entry in entries.values())
    last = [rank for rank, entry in entries.items() if entry.started == latest]
    text = f"all ranks came to {what.operation} #{what.sequence}"
    if late := latest - _since(entries):
        text += (
            f"; {_ranks(group, last)} came last, {table.duration(late)} after the first"
        )
    else:
        last = []
    failed = sorted(rank for rank, entry in entries.items() if entry.state == FAILED)
    text += f"; {_ranks(group, failed)} failed" if failed else "; bytes were moving"
    return _finding(SLOW, group, sorted(last), _since(entries), text)


def _finding(kind, group, ranks, since, text):
    communicator = group.communicator
    return Finding(
        kind=kind,
        title=communicator.title,
        key=communicator.key,
        group=group.index,
        ranks=tuple(ranks),
        since=since,
        text=text,
    )


def _since(entries) -> float:
    return min(entry.started for entry in entries.values())


def _first(entries) -> Entry:
    return min(entries.values(), key=lambda entry: (entry.started, entry.rank))


def _ranks(group, ranks) -> str:
    """Names ranks; up to two with their process and device.

    ``"rank 2 (process 1, cpu:2048)"``, ``"ranks 0-2, 7"``.
    """
    ranks = sorted(ranks)
    if len(ranks) > 2:
        return f"ranks {table.numbers(ranks)}"
    return " and ".join(_rank(group, rank) for rank in ranks)


def _rank(group, rank):
    platform = group.communicator.platform
    device = group.devices[rank]
    where = f"{platform}:{device}" if platform else f"device {device}"
    process = group.process_of[rank]
    if process is not None:
        where = f"process {process}, {where}"
    return f"rank {rank} ({where})"
