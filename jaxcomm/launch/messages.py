"""What launchers of several hosts say to each other: lines of one form each.

Who connects proves first that it knows the secret of the job, and then so does host 0,
each by a code over what the other chose at random. So a stranger can say nothing, and
learns nothing that it could say later.

===============================  ============  ========================================
line                             from          says
===============================  ============  ========================================
``challenge <nonce>``            host 0        prove who you are
``host <i> <H> <N> <nonce> <c>`` others        --host, --hosts and -n, and the code
``welcome <c>``                  host 0        the code
``beat``, ``done``               all           I live; my processes have ended
``ended <process> <status>``     all           a process has ended
``gave-up <process>``            all           others gave a process up: end it
``lost <host>``                  host 0        a host has ended, or is silent
``refused <why>``                host 0        two launchers do not fit together
===============================  ============  ========================================
"""

import hashlib
import hmac
import os
import re
import secrets
from typing import Any

from jaxcomm import own_file

_NONCE = rb"([0-9a-f]{32})"
_CODE = rb"([0-9a-f]{64})"
_PROCESS = rb"([0-9]{1,7})"
_HOST = rb"([0-9]{1,4})"
_FORMS = {
    "challenge": _NONCE,
    "host": rb" ".join((_HOST, _HOST, rb"([0-9]{1,3})", _NONCE, _CODE)),
    "welcome": _CODE,
    "beat": rb"",
    "done": rb"",
    "ended": _PROCESS + rb" ([0-9]{1,3})",
    "gave-up": _PROCESS,
    "lost": _HOST,
    "refused": rb"([ -~]{1,200})",
}
_NUMBER = re.compile(rb"[0-9]{1,7}")
LONGEST_BYTES = 256
_MOST_SECRET_BYTES = 4096
_LEAST_SECRET_BYTES = 16


class MalformedError(ValueError):
    """A line that no launcher of this version says."""


class SecretRefused(Exception):
    """A file cannot be the secret of a job; the text says why."""


def parse(line: bytes) -> tuple[Any, ...]:
    """Return the word of a line, and its numbers as int and texts as str.

    >>> parse(b"ended 3 137")
    ('ended', 3, 137)

    Raises:
      MalformedError: the line has none of the forms.
    """
    start, _, rest = line.partition(b" ")
    word = start.decode("ascii", "replace")
    form = re.fullmatch(_FORMS[word], rest) if word in _FORMS else None
    if form is None or len(line) > LONGEST_BYTES:
        raise MalformedError(line[:40])
    said = (
        int(each) if _NUMBER.fullmatch(each) else each.decode("ascii")
        for each in form.groups()
    )
    parsed = word, *said
    # A number has one form, without zeros in front.
    if compose(*parsed) != line + b"\n":
        raise MalformedError(line[:40])
    return parsed


def compose(word: str, *rest: Any) -> bytes:
    r"""Return a line, with its end.

    >>> compose("ended", 3, 137)
    b'ended 3 137\n'
    """
    return " ".join(map(str, (word, *rest))).encode() + b"\n"


def nonce() -> str:
    """Return what nobody has chosen before."""
    return secrets.token_hex(16)


def code(secret: bytes, *said: Any) -> str:
    """Return what only those who know the secret can say of some words."""
    text = " ".join(map(str, said))
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def is_code(given: str, secret: bytes, *said: Any) -> bool:
    """Return whether a code is right; the time this takes tells nothing of it."""
    return hmac.compare_digest(given, code(secret, *said))


def read_secret(path: str) -> bytes:
    """Return the secret in a file of this user that nobody else may read.

    Raises:
      SecretRefused: the file is no such file.
    """
    try:
        with own_file.opened(path) as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise SecretRefused(
                    f"--secret: others may read or write {path!r}. Make it yours "
                    "alone: chmod 600"
                )
            secret = file.read(_MOST_SECRET_BYTES + 1).strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SecretRefused(
            f"--secret: {path!r} cannot be read: {reason}. Name another file"
        ) from None
    if not _LEAST_SECRET_BYTES <= len(secret) <= _MOST_SECRET_BYTES:
        raise SecretRefused(
            f"--secret: {path!r} holds {len(secret)} bytes. Give it "
            f"{_LEAST_SECRET_BYTES} to {_MOST_SECRET_BYTES} that nobody can guess"
        )
    return secret
