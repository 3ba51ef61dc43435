"""The form of every text in the job's store, by which its reader knows who wrote it.

``<version> <process> <checksum> <JSON>``: which jaxcomm wrote the text, which process,
and the CRC-32 of the key and of the rest. The form never changes, so that any two
versions of jaxcomm can name each other. What the JSON holds changes with ``PROTOCOL``.
"""

import json
import re
import zlib
from typing import Any

from jaxcomm import _ffi
from jaxcomm._built import VERSION
from jaxcomm.errors import CommunicatorError

# Raise it with each change of the keys, of the JSON, or of what a process does with it.
PROTOCOL = 1
# Processes of a host must also agree on what lies where in the memory that they share.
_MEMORY = _ffi.shared_memory_layout() % 2**32

_FORM = re.compile(r"(\S+) ([0-9]+) ([0-9a-f]{8}) (.*)", re.DOTALL)
_SHOWN_CHARACTERS = 60


class EntryError(CommunicatorError):
    """An entry of the job's store that this jaxcomm did not write."""

    def __init__(self, key: str, found: str | bytes, process: str | None = None):
        name = key.rpartition("/")[2]
        process = name if name.isdecimal() else process
        writer = "a process" if process is None else f"process {process}"
        super().__init__(
            f"entry {key!r} of the job's store holds {found[:_SHOWN_CHARACTERS]!r}, "
            f"which is not what the jaxcomm of {writer} writes there. Install the same "
            f"version of jaxcomm in all processes, and leave keys that begin with "
            f"'jaxcomm/' to it"
        )


class VersionError(EntryError):
    """An entry of the job's store that another version of jaxcomm wrote."""

    def __init__(self, process: str, version: str, own: str):
        CommunicatorError.__init__(
            self,
            f"process {process} runs jaxcomm {version} and this process runs jaxcomm "
            f"{own} (version/protocol/shared memory). Install the same version in all "
            f"processes",
        )


def own_version() -> str:
    """Return what must be the same in all processes of a job."""
    return f"{VERSION}/{PROTOCOL}/{_MEMORY:08x}"


def seal(key: str, process: int, value: Any) -> str:
    """Return the text of an entry.

    Args:
      key: of the entry.
      process: that writes it.
      value: of JSON's types.
    """
    version, text = own_version(), json.dumps(value)
    checksum = _checksum(key, version, str(process), text)
    return f"{version} {process} {checksum} {text}"


def unseal(key: str, text: str) -> Any:
    """Return the value of an entry.

    Raises:
      EntryError: it is not what :func:`seal` returns for the key.
      VersionError: it is, in another version of jaxcomm.
    """
    form = _FORM.fullmatch(text)
    if form is None:
        raise EntryError(key, text)
    version, process, checksum, value = form.groups()
    if checksum != _checksum(key, version, process, value):
        raise EntryError(key, text, process)
    if version != own_version():
        raise VersionError(process, version, own_version())
    return json.loads(value)


def _checksum(*parts: str) -> str:
    return f"{zlib.crc32(' '.join(parts).encode(errors='replace')):08x}"
