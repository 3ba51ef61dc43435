"""What the processes were doing: the flight records of a run, and what they say."""

import contextlib
import os
import pathlib
import re
import sys
import time

VARIABLE = "JAXCOMM_DUMP_DIR"
_PATTERN = "flight-record-*.json"
_RINGS = "nccl-*.ring"


# What a process, or a launcher, calls its own.
_NAME = re.compile(r"flight-record-([0-9]{1,7}|launcher-[!-.0-~]{1,64})\.json")
_RING = re.compile(r"nccl-[0-9]{1,7}\.ring")
# Of so many processes nobody reads more.
_MOST_RECORDS = 1024
_FOLDER = "records"


class FolderRefused(Exception):
    """A folder that the run needs cannot be had; the text says why."""


def folder(own: pathlib.Path) -> pathlib.Path:
    """Return the folder for a run's records: the user's, or one in the run's own."""
    chosen = os.environ.get(VARIABLE)
    return pathlib.Path(chosen).absolute() if chosen else own / _FOLDER


def are_kept(own: pathlib.Path) -> bool:
    """Return whether the own folder of a run holds records.

    It stays then: the processes have named them, and told the user what to do with
    them.
    """
    return any((own / _FOLDER).rglob("flight-record-[0-9]*.json"))


def say_where(own: pathlib.Path) -> None:
    """Say where the records are that the run's own folder keeps."""
    if are_kept(own):
        _say(
            f"{own / _FOLDER} keeps the flight records, until some later runs keep "
            f"theirs; {VARIABLE} names another folder"
        )


def make(path: pathlib.Path) -> None:
    """Make a folder for the records of an attempt, unless it is there.

    Raises:
      FolderRefused: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FolderRefused(
            f"the folder {path} of flight records cannot be made: {error.strerror}. "
            f"Set {VARIABLE} to another one"
        ) from None


def of_run(where: pathlib.Path, since: float) -> list[pathlib.Path]:
    """Return the records of a run, those of launchers too.

    Args:
      where: folder they are in.
      since: ``time.time()`` before the run; older ones are of another.
    """
    return _newer(where.glob(_PATTERN), _NAME, since)


def rings_of_run(where: pathlib.Path, since: float) -> list[pathlib.Path]:
    """Return the files of a run in which NCCL's callbacks write.

    Args:
      where: folder they are in.
      since: as in :func:`of_run`.
    """
    return _newer(where.glob(_RINGS), _RING, since)


def _newer(paths, names, since):
    return sorted(
        path for path in paths if names.fullmatch(path.name) and _is_newer(path, since)
    )[:_MOST_RECORDS]


def set_aside(where: pathlib.Path, process: int) -> None:
    """Keep the record of a process that is started again, and read it no more."""
    path = where / f"flight-record-{process}.json"
    with contextlib.suppress(OSError):
        path.rename(path.with_suffix(".json.lost"))


def version(where: pathlib.Path, process: int) -> object:
    """Return what differs once a process has written its record anew."""
    try:
        status = (where / f"flight-record-{process}.json").lstat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _is_newer(path, since) -> bool:
    try:
        return path.lstat().st_mtime >= since
    except OSError:
        return False  # It is gone.


def _say(text):
    print(f"jaxcomm.launch: {text}", file=sys.stderr, flush=True)


def now() -> float:
    """Return ``time.time()``, less the coarseness of a file's time."""
    return time.time() - 0.1
