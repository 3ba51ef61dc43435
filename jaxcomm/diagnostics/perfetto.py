"""Flight records as a trace that https://ui.perfetto.dev and chrome://tracing open.

The format is Chrome's "Trace Event Format": complete events ("X") on threads of
processes, their names as metadata ("M"), and arrows between them ("s", "f").
"""

import itertools
import json
import os
from collections.abc import Iterator
from typing import Any

from jaxcomm.diagnostics import record
from jaxcomm.diagnostics.merge import Merged
from jaxcomm.diagnostics.timeline import Bar, Timeline, rows, timeline

# Behind the name of an operation, beside its color the one thing that is seen at once.
_MARKS = {record.STARTED: " (not ended)", record.FAILED: " (failed)"}


def save(merged: Merged, path: str | os.PathLike) -> None:
    """Write the operations of some processes.

    Raises:
      OSError: if the file cannot be written.
      ValueError: if no operation is on record.
    """
    found = timeline(merged)
    document = {
        "traceEvents": list(_events(merged, found)),
        "displayTimeUnit": "ns",
        "otherData": {
            "written by": "jaxcomm",
            "time 0, seconds since 1970": found.start,
            "seconds added to the clocks of hosts": dict(found.corrections),
        },
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file)


def _events(merged: Merged, found: Timeline) -> Iterator[dict[str, Any]]:
    for process, one in merged.records.items():
        name = f"process {process} (pid {one.pid}, {one.host})"
        yield _named("process", name, _pid(process), _pid(process))
    tracks = rows(
        found.bars, lambda bar: (bar.process, bar.device, bar.communicator.key)
    )
    track_of = {}
    # Perfetto names a thread by its number alone, and takes a process's for a thread's.
    numbers = itertools.count(_pid(max(merged.records)) + 1)
    for levels in tracks.values():
        for level, bars in enumerate(levels):
            track = _pid(bars[0].process), next(numbers)
            yield from _names(track, _title(bars[0]) + f" +{level}" * (level > 0))
            for bar, after in itertools.zip_longest(bars, bars[1:]):
                track_of[id(bar)] = track
                # A viewer drops or nests events of a track that overlap.
                end = bar.end if after is None else min(bar.end, after.start)
                yield _event(bar, max(end, bar.start), track, found.start)
    for bars in found.together:
        for arrow in _arrows(bars, track_of, found.start):
            number = next(numbers)
            yield from ({**end, "id": number} for end in arrow)


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


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
