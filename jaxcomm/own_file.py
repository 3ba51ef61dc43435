"""Reading of files that another user or a broken program may have put there."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

# Some systems lack some of them. A FIFO that nobody writes to must not hold the reader.
_FLAGS = os.O_RDONLY | sum(
    getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOFOLLOW", "O_CLOEXEC")
)
_LINK = "it is a symbolic link. Name the file itself"


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield a regular file of this user or of root, open for reading.

    Raises:
      OSError: if the file cannot be opened, is a link, a FIFO or a device, or belongs
        to another user. ``strerror`` says which.
    """
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, _LINK, os.fspath(path)) from None
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
        if hasattr(os, "geteuid") and found.st_uid not in (os.geteuid(), 0):
            why = f"it belongs to user {found.st_uid}. Copy it to read it"
            raise PermissionError(errno.EPERM, why, os.fspath(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def read(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Return what is in a file of this user.

    Args:
      path: of the file.
      most_bytes: a larger file is refused.

    Raises:
      OSError: as of :func:`opened`, or if the file is too large.
    """
    with opened(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        why = f"it is larger than {most_bytes} bytes"
        raise OSError(errno.EFBIG, why, os.fspath(path))
    return content
