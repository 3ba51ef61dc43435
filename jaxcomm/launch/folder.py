"""The folder of a run, which nobody but the user of the job may enter.

It holds the socket of the job's store, the file that names ended processes, and flight
records unless the user chose another folder. All runs of a user lie in one folder,
``jaxcomm-<uid>``. Each launcher deletes there what killed launchers left, and all but
the last few folders that keep records.
"""

import contextlib
import fcntl
import os
import pathlib
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator

from jaxcomm.launch import records

# What the address of a socket holds, without the zero at its end.
_LONGEST_PATH = 107
# gRPC reads an address as a URI, in which other characters have a meaning.
_PLAIN = re.compile(r"[\w/.+=@-]+", re.ASCII)
_SHORT = "/tmp"
_PREFIX = "run-"
# Names of a run and of a socket are not longer.
_LONGEST_NAME = "/run-12345678/store-12345"
_KEPT = 8
_TRIES = 100


@contextlib.contextmanager
def of_run() -> Iterator[pathlib.Path]:
    """Yield a new folder; it is deleted at the end, unless it keeps flight records.

    Raises:
      FolderRefused: the folder of the user cannot be made, or may be another user's.
    """
    home = _of_user()
    made, lock = _make(home)
    _clean(home)
    try:
        yield made
    finally:
        records.say_where(made)
        if not records.are_kept(made):
            shutil.rmtree(made, ignore_errors=True)
        if lock is not None:
            os.close(lock)
        with contextlib.suppress(OSError):  # Another run has its folder there.
            home.rmdir()


def _of_user() -> pathlib.Path:
    name = f"jaxcomm-{os.geteuid()}"
    try:
        home = pathlib.Path(tempfile.gettempdir(), name)
    except FileNotFoundError as error:
        raise records.FolderRefused(
            f"{error.strerror}. Set TMPDIR to another folder"
        ) from None
    path = f"{home}{_LONGEST_NAME}"
    if len(path) > _LONGEST_PATH or not _PLAIN.fullmatch(path):
        return pathlib.Path(_SHORT, name)
    return home


def _make(home: pathlib.Path) -> tuple[pathlib.Path, int | None]:
    """Return a new folder and the lock that says that it is in use.

    The lock ends with its process, however that ends.
    """
    for _ in range(_TRIES):
        # Another launcher may take either folder for one that nobody uses.
        with contextlib.suppress(FileNotFoundError):
            _check(home)
            made = _new(home)
            try:
                lock = _lock(made)
            except BlockingIOError:
                continue
            except OSError:  # This file system has no locks.
                return made, None
            if made.exists():
                return made, lock
            os.close(lock)
    raise records.FolderRefused(
        f"{home}: other launchers delete it. Set TMPDIR to another"
    )


def _new(home: pathlib.Path) -> pathlib.Path:
    try:
        return pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX, dir=home))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise records.FolderRefused(
            f"no folder can be made in {home}: {error.strerror}. "
            "Set TMPDIR to another folder"
        ) from None


def _check(home: pathlib.Path) -> None:
    try:
        home.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        pass  # No folder: refused below.
    except OSError as error:
        raise records.FolderRefused(
            f"{home} cannot be made: {error.strerror}. Set TMPDIR to another folder"
        ) from None
    found = home.lstat()
    is_folder = stat.S_ISDIR(found.st_mode)
    if not is_folder or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise records.FolderRefused(
            f"{home} is not a folder of this user alone, so others could end the job. "
            "Delete it, or set TMPDIR to a folder of your own"
        )


def _clean(home: pathlib.Path) -> None:
    """Delete what launchers that were killed left, and old records."""
    kept = []
    for run in home.glob(f"{_PREFIX}*"):
        # Another launcher is in it, or deletes it.
        with contextlib.suppress(OSError):
            lock = _lock(run)
            try:
                if records.are_kept(run):
                    kept.append((run.stat().st_mtime, run))
                else:
                    shutil.rmtree(run, ignore_errors=True)
            finally:
                os.close(lock)
    for _, run in sorted(kept)[:-_KEPT]:
        shutil.rmtree(run, ignore_errors=True)


def _lock(run: pathlib.Path) -> int:
    descriptor = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
