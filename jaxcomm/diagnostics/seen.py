"""What the launcher saw of its processes: evidence that they cannot give themselves.

It is a file beside the flight records, JSON::

    {"version": 1, "time": 1763640000.5, "processes": 4, "seen": [
      {"process": 2, "pid": 4711, "host": "node7", "status": null, "order": 0,
       "state": "T", "works": false}]}
"""

import dataclasses
import json
import os
import pathlib
import signal
from collections.abc import Iterable
from typing import Any

from jaxcomm.diagnostics import record

# Names of the states in which the kernel lists a process, see proc(5).
STATES = {
    "T": "is stopped",
    "t": "is stopped by a debugger",
    "D": "waits in the kernel",
    "S": "sleeps",
    "R": "runs",
    "Z": "has ended",
}
STOPPED = ("T", "t")
SIGNAL_BASE = 128
# Of a process that the extension ends since a collective failed, see last_resort.h.
ENDED_STATUS = 70
_MOST = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """One process, as its launcher saw it before it stopped anything.

    Attributes:
      process: its index.
      pid: of the operating system; 0 if it runs on another host.
      host: name of the machine.
      status: with which it or its program has ended, 128 + n after signal n. None if
        it runs.
      order: how many-th failure of the job its end was, from 1; 0 if it was none.
      was_given_up: whether others went on without it.
      was_asked: whether it ran, and had not failed, when somebody asked the launcher to
        end the job, as by Ctrl-C.
      state: the kernel's letter for what it does; empty if unknown.
      works: whether its CPU time moved on. None if unknown.
      call: the kernel's function in which its first thread waits; empty if unknown.
    """

    process: int
    pid: int
    host: str
    status: int | None = None
    order: int = 0
    was_given_up: bool = False
    was_asked: bool = False
    state: str = ""
    works: bool | None = None
    call: str = ""

    def __str__(self) -> str:
        """Say what it does, or how it ended, as a predicate of it."""
        if self.status is not None:
            return describe(self.status)
        does = STATES.get(self.state[:1])
        if does is None:
            return ""
        if self.state in STOPPED or self.works is None:
            return f"{does} (state {self.state})"
        time = "moves on" if self.works else "stands still"
        return f"{does} (state {self.state}), and its CPU time {time}"


def describe(status: int) -> str:
    """Say how a process ended, as a predicate of it.

    >>> describe(137), describe(3)
    ('was ended by SIGKILL', 'ended with status 3')
    """
    if status > SIGNAL_BASE:
        try:
            return f"was ended by {signal.Signals(status - SIGNAL_BASE).name}"
        except ValueError:
            pass
    return f"ended with status {status}"


def path_of(folder: pathlib.Path, host: str) -> pathlib.Path:
    """Return the file of a host's launcher, which patterns of records match."""
    return folder / f"flight-record-launcher-{host}.json"


def to_json(seen: Iterable[Seen], processes: int, time: float) -> str:
    """Return what the file holds."""
    listed = [dataclasses.asdict(each) for each in seen]
    return json.dumps(
        {"version": 1, "time": time, "processes": processes, "seen": listed}
    )


def write(seen: Iterable[Seen], processes: int, time: float, path: pathlib.Path):
    """Write the file, whole as soon as it is there.

    Raises:
      OSError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    # Others may write to the folder: nothing of theirs is followed.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with os.fdopen(os.open(part, flags, 0o666), "w", encoding="utf-8") as file:
        file.write(to_json(seen, processes, time))
    part.replace(path)


def is_of_launcher(document: Any) -> bool:
    """Return whether a document claims to be of a launcher."""
    return isinstance(document, dict) and "seen" in document


def parse(document: Any) -> list[Seen]:
    """Read what :func:`json.load` returned; the whole document is checked.

    Raises:
      RecordError: it is not of a launcher, or of another version.
    """
    if not is_of_launcher(document):
        raise record.RecordError("not a record of a launcher of jaxcomm")
    record.check_version(document)
    listed = document["seen"]
    try:
        if not isinstance(listed, list) or len(listed) > _MOST:
            raise TypeError(f"seen is {record.quoted(listed)}")
        found = [record.fill(Seen, each) for each in listed]
        for each in found:
            if not 0 <= each.process < record.MOST_PROCESSES or each.status not in (
                None,
                *range(256),
            ):
                raise ValueError(f"seen is {record.quoted(each)}")
    except (KeyError, TypeError, ValueError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise record.RecordError(f"a damaged record of a launcher: {why}") from None
    return found
