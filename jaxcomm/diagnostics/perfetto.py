"""Flight records as a trace that https://ui.perfetto.dev and chrome://tracing open.

The format is Chrome's "Trace Event Format": complete events ("X") on threads of
processes, their names as metadata ("M"), arrows between them ("s", "f"), and counters
("C").
"""

import dataclasses
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

from jaxcomm.diagnostics import record, waits
from jaxcomm.diagnostics.alignment import Group, meetings
from jaxcomm.diagnostics.merge import Merged
from jaxcomm.diagnostics.record import CommunicatorRecord, Entry

# Behind the name of an operation, beside its color the one thing that is seen at once.
_MARKS = {record.STARTED: " (not ended)", record.FAILED: " (failed)"}
# Times are rounded to a quarter of a microsecond: bars that touch may seem to overlap.
_TOUCHING = 1e-6


@dataclasses.dataclass(frozen=True)
class Bar:
    """One operation of one rank.

    Attributes:
      process: index of the process.
      communicator: what it ran on.
      entry: what was recorded.
      end: when it ended, or when the record of an operation that has not was written.
    """

    process: int
    communicator: CommunicatorRecord
    entry: Entry
    end: float

    @property
    def start(self) -> float:
        """When it began, in seconds since 1970."""
        return self.entry.started

    @property
    def device(self) -> tuple[str, int]:
        """Platform and global id of the device."""
        return self.communicator.platform or "device", self.entry.device


def _bars(merged: Merged) -> dict[int, Bar]:
    """Return the bars of all operations, by the ids of their entries.

    Raises:
      ValueError: if no operation is on record.
    """
    found = {}
    for process, one in merged.records.items():
        for communicator in one.communicators:
            for entry in communicator.entries:
                end = one.time if entry.ended is None else entry.ended
                found[id(entry)] = Bar(
                    process, communicator, entry, max(entry.started, end)
                )
    if not found:
        raise ValueError(
            "flight record: no operation is on record, so there is nothing to show. "
            "Run a program with collectives first; those of backend 'xla' are not "
            "recorded."
        )
    return found


def _tracks(bars: Iterable[Bar]) -> list[list[list[Bar]]]:
    """Return the bars of each rank of a communicator, in levels.

    A bar is in the first level that is free when it starts, so that those of a level do
    not overlap.
    """
    found: dict[tuple, list[list[Bar]]] = {}
    for bar in sorted(bars, key=lambda bar: (bar.device, bar.start, bar.end)):
        key = bar.process, bar.device, bar.communicator.key
        levels = found.setdefault(key, [])
        for level in levels:
            if level[-1].end <= bar.start + _TOUCHING:
                level.append(bar)
                break
        else:
            levels.append([bar])
    return list(found.values())


def save(merged: Merged, path: str | os.PathLike) -> None:
    """Write the operations of some processes.

    Raises:
      OSError: if the file cannot be written.
      ValueError: if no operation is on record.
    """
    bar_of = _bars(merged)
    begin = min(bar.start for bar in bar_of.values())
    document = {
        "traceEvents": list(_events(merged, bar_of, begin)),
        "displayTimeUnit": "ns",
        "otherData": {"written by": "jaxcomm", "time 0, seconds since 1970": begin},
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file)


def _events(
    merged: Merged, bar_of: dict[int, Bar], begin: float
) -> Iterator[dict[str, Any]]:
    for process, one in merged.records.items():
        name = f"process {process} (pid {one.pid}, {one.host})"
        yield _named("process", name, _pid(process), _pid(process))
    track_of = {}
    # Perfetto names a thread by its number alone, and takes a process's for a thread's.
    numbers = itertools.count(_pid(max(merged.records)) + 1)
    for levels in _tracks(bar_of.values()):
        for level, bars in enumerate(levels):
            track = _pid(bars[0].process), next(numbers)
            yield from _names(track, _title(bars[0]) + f" +{level}" * (level > 0))
            for bar, after in itertools.zip_longest(bars, bars[1:]):
                track_of[id(bar)] = track
                # A viewer drops or nests events of a track that overlap.
                end = bar.end if after is None else min(bar.end, after.start)
                yield _event(bar, max(end, bar.start), track, begin)
    for group in merged.groups:
        for met in meetings(group).values():
            bars = [bar_of[id(entry)] for entry in met.values()]
            for arrow in _arrows(bars, track_of, begin):
                number = next(numbers)
                yield from ({**end, "id": number} for end in arrow)
        yield from _waits(group, begin)


def _pid(process: int) -> int:
    # Viewers take 0 for the system's own.
    return process + 1


def _title(bar: Bar) -> str:
    communicator = bar.communicator
    lane = "" if communicator.lane == "default" else f", lane {communicator.lane!r}"
    platform, device = bar.device
    return f"rank {bar.entry.rank} over {communicator.axes}{lane} ({platform}:{device})"


def _names(track, title: str) -> Iterator[dict[str, Any]]:
    process, number = track
    yield _named("thread", title, process, number)
    yield {
        "name": "thread_sort_index",
        "ph": "M",
        "pid": process,
        "tid": number,
        "args": {"sort_index": number},
    }


def _named(what: str, name: str, process: int, number: int) -> dict[str, Any]:
    return {
        "name": f"{what}_name",
        "ph": "M",
        "pid": process,
        "tid": number,
        "args": {"name": name},
    }


def _event(bar: Bar, end: float, track, origin: float) -> dict[str, Any]:
    entry, communicator = bar.entry, bar.communicator
    start = _microseconds(bar.start - origin)
    return {
        "name": entry.name + _MARKS.get(entry.state, ""),
        "cat": entry.collective,
        "ph": "X",
        "pid": track[0],
        "tid": track[1],
        "ts": start,
        # Of rounded times: a duration rounded by itself may reach into the next event.
        "dur": round(_microseconds(end - origin) - start, 3),
        "args": {
            "operands": entry.operands,
            "dtype": entry.dtype,
            "bytes": entry.bytes,
            "axes": communicator.axes,
            "lane": communicator.lane,
            "backend": communicator.backend,
            "group": entry.group,
            "rank": entry.rank,
            "state": entry.state,
            "sequence": entry.sequence,
            "run": entry.run_id,
            "site": entry.site,
        },
    }


def _arrows(bars, track_of, origin: float) -> Iterator[tuple[dict, dict]]:
    """Yield both ends of arrows from the last rank to come to those that waited."""
    last = max(bars, key=lambda bar: bar.start)
    for bar in bars:
        both = min(bar.end, last.end) - last.start
        if bar is last or both <= 0:
            continue
        # Within both events, and close to the beginning of the last.
        at = _microseconds(last.start - origin + min(both / 2, 1e-7))
        arrow = {"name": "came last", "cat": "waiting", "ts": at}
        (pid, tid), (to_pid, to_tid) = track_of[id(last)], track_of[id(bar)]
        yield (
            {**arrow, "ph": "s", "pid": pid, "tid": tid},
            {**arrow, "ph": "f", "bp": "e", "pid": to_pid, "tid": to_tid},
        )


def _waits(group: Group, origin: float) -> Iterator[dict[str, Any]]:
    """Yield for each rank a counter of the seconds that others waited for it."""
    total = dict.fromkeys(group.entries, 0.0)
    for wait in waits.waits(group):
        process = group.process_of[wait.rank]
        if process is None:
            continue
        total[wait.rank] += max(wait.seconds.values())
        rank = f"rank {wait.rank} of group {group.index}"
        yield {
            "name": f"others waited for {rank} over {group.communicator.title}",
            "ph": "C",
            "pid": _pid(process),
            "ts": _microseconds(wait.began - origin),
            "args": {"seconds": round(total[wait.rank], 6)},
        }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
