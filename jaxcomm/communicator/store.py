"""The key-value store of ``jax.distributed``, with values of JSON's types."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from jaxcomm import compat
from jaxcomm.communicator.sealed import EntryError, seal, unseal
from jaxcomm.errors import CommunicatorError


class Store:
    """Entries that all processes of a job read and write. None of them is null.

    What reads an entry raises EntryError if this jaxcomm did not write it.

    Attributes:
      client: of ``jax.distributed``.
    """

    def __init__(self, client: Any):
        self.client = client

    def set(self, key: str, value: Any, by: int) -> None:
        """Write an entry of a process, over an older one."""
        text = seal(key, by, value)
        self.client.key_value_set(key, text, allow_overwrite=True)

    def set_once(self, key: str, value: Any, by: int) -> bool:
        """Write an entry if there is none yet; return whether there was none."""
        text = seal(key, by, value)
        try:
            self.client.key_value_set(key, text, allow_overwrite=False)
        except Exception as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return False
        return True

    def get(self, key: str) -> Any:
        """Return the value of an entry, None if there is none."""
        try:
            with _of_text(key):
                text = self.client.key_value_try_get(key)
        except Exception as error:
            if "NOT_FOUND" not in str(error):
                raise
            return None
        return unseal(key, text)

    def entries(self, folder: str) -> dict[int, Any]:
        """Return what is in a folder whose entries have numbers for names."""
        with _of_text(folder):
            texts = dict(self.client.key_value_dir_get(folder))
        names = {key: key.rpartition("/")[2] for key in texts}
        for key, name in names.items():
            if not name.isdecimal():
                raise EntryError(key, texts[key])
        return {int(name): unseal(key, texts[key]) for key, name in names.items()}

    def wait(self, key: str, seconds: float) -> Any:
        """Wait for an entry; return its value, None if it does not come in time.

        The client raises one type for all its errors. An error before the time is over
        means that the store failed, and is raised. After it, the entry is late; if the
        store failed too, the next request raises.
        """
        begin = time.monotonic()
        milliseconds = max(1, int(seconds * 1000))
        try:
            with _of_text(key):
                text = self.client.blocking_key_value_get(key, milliseconds)
        except EntryError:
            raise
        except Exception:
            # The client's clock may run a little ahead of this one.
            if time.monotonic() - begin < 0.9 * seconds:
                raise
            return None
        return unseal(key, text)


@contextlib.contextmanager
def _of_text(key: str) -> Iterator[None]:
    """Name the entry if the client finds bytes in it that are no text."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise EntryError(key, error.object) from None


_lock = threading.Lock()
_of_job: Store | None = None


def of_job(processes: tuple[int, ...]) -> Store:
    """Return the store of this job, always the same one.

    Raises:
      CommunicatorError: ``jax.distributed`` was not initialized; the text names
        ``processes``.
    """
    client = compat.key_value_store()
    if client is None:
        raise CommunicatorError(
            f"processes {list(processes)} cannot find each other: call "
            f"jax.distributed.initialize() in each of them first"
        )
    global _of_job
    with _lock:
        if _of_job is None or _of_job.client is not client:
            _of_job = Store(client)
        return _of_job
