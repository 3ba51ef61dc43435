"""What the processes were doing: the flight records of a run, and what they say."""

import contextlib
import os
import pathlib
import re
import sys
import time

VARIABLE = "JAXCOMM_DUMP_DIR"
_PATTERN = "flight-record-*.json"


# What a process calls its own.
_NAME = re.compile(r"flight-record-[0-9]{1,7}\.json")
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
    return any((own / _FOLDER).rglob(_PATTERN))


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
            f"{VARIABLE}: {path} cannot be made: {error.strerror}. Name another folder"
        ) from None


def print_merged(where: pathlib.Path, since: float):
    """Print the merged records to stderr, if there are any.

    Args:
      where: folder they are in.
      since: ``time.time()`` before the run; older ones are of another.
    """
    paths = sorted(
        path for path in where.glob(_PATTERN) if _is_newer_record(path, since)
    )[:_MOST_RECORDS]
    if not paths:
        return
    try:
        # Late: most runs do not fail.
        from jaxcomm.diagnostics.merge import merge_files

        text = str(merge_files(paths))
    except Exception as error:
        # The status of the run matters more, and a dying process may write half a file.
        _say(f"cannot read the flight records: {error!r}")
        return
    # Nobody may read it any more, and the run go on all the same.
    with contextlib.suppress(BrokenPipeError):
        print(text, file=sys.stderr, flush=True)


def _is_newer_record(path, since) -> bool:
    if not _NAME.fullmatch(path.name):
        return False
    try:
        return path.lstat().st_mtime >= since
    except OSError:
        return False  # It is gone.


def _say(text):
    print(f"jaxcomm.launch: {text}", file=sys.stderr, flush=True)


def now() -> float:
    """Return ``time.time()``, less the coarseness of a file's time."""
    return time.time() - 0.1
