"""What the processes were doing: the flight records of a run, and what they say."""

import contextlib
import os
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator

VARIABLE = "JAXCOMM_DUMP_DIR"
_PATTERN = "flight-record-*.json"


class FolderRefused(Exception):
    """The folder that the user chose cannot be made; the text says why."""


@contextlib.contextmanager
def folder() -> Iterator[pathlib.Path]:
    """Yield the folder for this run's records: the user's, or a temporary one.

    That stays if there are records: the processes have named them, and told the user
    what to do with them.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen:
        yield pathlib.Path(chosen).absolute()
        return
    made = pathlib.Path(tempfile.mkdtemp(prefix="jaxcomm-launch-"))
    try:
        yield made
    finally:
        if any(made.rglob(_PATTERN)):
            _say(
                f"{made} keeps the flight records; {VARIABLE} names another folder for "
                "those of the next run"
            )
        else:
            shutil.rmtree(made, ignore_errors=True)


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
        path for path in where.glob(_PATTERN) if path.stat().st_mtime >= since
    )
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


def _say(text):
    print(f"jaxcomm.launch: {text}", file=sys.stderr, flush=True)


def now() -> float:
    """Return ``time.time()``, less the coarseness of a file's time."""
    return time.time() - 0.1
