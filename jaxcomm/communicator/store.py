"""The key-value store of ``jax.distributed``, with values of JSON's types.

A text in it has the form ``<version> <process> <JSON>``: which jaxcomm wrote it, and
which process. The form never changes, so that any two versions can name each other.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

from jaxcomm import compat
from jaxcomm._built import ABSENCE, VERSION, _ffi
from jaxcomm.errors import CommunicatorError

# Raise it with each change of the keys, of the JSON, or of what a process does with it.
PROTOCOL = 4
# Processes of a host must also agree on what lies where in the memory that they share.
_MEMORY = 0 if ABSENCE else _ffi.shared_memory_layout() % 2**32

_FORM = re.compile(
    r"([\w.+-]{1,40}/[0-9]{1,9}/[0-9a-f]{8}) ([0-9]{1,9}) (.*)", re.ASCII | re.DOTALL
)
_SHOWN_CHARACTERS = 60


class EntryError(CommunicatorError):
    """An entry of the job's store that this version of jaxcomm did not write."""


class Store:
    """Entries that all processes of a job read and write. None of them is null.

    The client raises one type for all its errors, whose texts begin with a code. Errors
    that this class does not expect are raised as they are.

    Args:
      client: of ``jax.distributed``.
    """

    def __init__(self, client: Any):
        self.client = client

    def set(self, key: str, value: Any, by: int) -> None:
        """Write an entry of process ``by``, over an older one."""
        self.client.key_value_set(key, seal(by, value), allow_overwrite=True)

    def set_once(self, key: str, value: Any, by: int) -> bool:
        """Write an entry if there is none yet; return whether there was none."""
        try:
            self.client.key_value_set(key, seal(by, value), allow_overwrite=False)
        except Exception as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return False
        return True

    def get(self, key: str) -> Any:
        """Return the value of an entry, None if there is none."""
        try:
            text = self.client.key_value_try_get(key)
        except Exception as error:
            if "NOT_FOUND" not in str(error):
                raise
            return None
        return unseal(key, text)

    def wait(self, key: str, seconds: float) -> Any:
        """Wait for an entry; return its value, None if it does not come in time."""
        try:
            text = self.client.blocking_key_value_get(key, int(seconds * 1000))
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None
        return unseal(key, text)

    def entries(self, folder: str, processes: Iterable[int]) -> dict[int, Any]:
        """Return the values in a folder that some processes wrote, by process.

        Nothing else in the folder is looked at.

        Raises:
          EntryError: this version of jaxcomm did not write one of them.
        """
        texts = dict(self.client.key_value_dir_get(folder))
        keys = {process: f"{folder}/{process}" for process in processes}
        return {p: unseal(key, texts[key]) for p, key in keys.items() if key in texts}


def own_version() -> str:
    """Return what must be the same in all processes of a job."""
    return f"{VERSION}/{PROTOCOL}/{_MEMORY:08x}"


def seal(process: int, value: Any) -> str:
    """Return the text of an entry that a process writes."""
    return f"{own_version()} {process} {json.dumps(value)}"


def unseal(key: str, text: str) -> Any:
    """Return the value of an entry.

    Raises:
      EntryError: this version of jaxcomm did not write it.
    """
    form = _FORM.fullmatch(text)
    if form is None:
        raise not_ours(key, text)
    version, process, value = form.groups()
    if version != own_version():
        raise EntryError(
            f"process {process} runs jaxcomm {version} and this process runs jaxcomm "
            f"{own_version()} (version/protocol/shared memory). Install the same "
            f"version in all processes"
        )
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise not_ours(key, text) from None


def not_ours(key: str, found: object) -> EntryError:
    """Return the error of an entry whose text or value jaxcomm does not write."""
    # !a: a terminal acts on some characters that repr() leaves.
    return EntryError(
        f"entry {key[:_SHOWN_CHARACTERS]!a} of the job's store holds "
        f"{str(found)[:_SHOWN_CHARACTERS]!a}, which jaxcomm did not write. Leave keys "
        f"that begin with 'jaxcomm/' to it"
    )


class _Below:
    """A client whose entries are all in one folder of another's.

    Args:
      client: the other.
      folder: its name, with a slash behind.
    """

    def __init__(self, client: Any, folder: str):
        self._client, self._folder = client, folder

    def __getattr__(self, name):
        call = getattr(self._client, name)
        return lambda key, *rest, **options: call(self._folder + key, *rest, **options)

    def key_value_dir_get(self, key):
        found = self._client.key_value_dir_get(self._folder + key)
        return [(key.removeprefix(self._folder), text) for key, text in found]


_of_job: Store | None = None
# The client of the job, and the store of the epoch that this process has entered.
_entered: tuple[Any, Store] | None = None


def of_job(processes: tuple[int, ...]) -> Store:
    """Return the store of this job, the same one until :func:`enter`."""
    of_all = of_whole_job(processes)
    if _entered is not None and _entered[0] is of_all.client:
        return _entered[1]
    return of_all


def enter(processes: tuple[int, ...], epoch: str) -> None:
    """Have all that follows find a store without entries, as all who call this do.

    Nothing that was written, counted or remembered before is taken for news there.

    Args:
      processes: who meet there.
      epoch: its name, another one each time.
    """
    global _entered
    client = of_whole_job(processes).client
    _entered = client, Store(_Below(client, f"jaxcomm/epochs/{epoch}/"))


def of_whole_job(processes: tuple[int, ...]) -> Store:
    """Return the store that also those find who entered no epoch."""
    client = compat.key_value_store()
    if client is None:
        raise CommunicatorError(
            f"processes {list(processes)} cannot find each other: call "
            f"jax.distributed.initialize() in each of them first"
        )
    global _of_job
    if _of_job is None or _of_job.client is not client:
        _of_job = Store(client)
    return _of_job
