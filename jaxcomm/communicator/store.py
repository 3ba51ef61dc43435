"""The key-value store of ``jax.distributed``, with JSON for values."""

import json
import time
from typing import Any

from jaxcomm import compat
from jaxcomm.errors import CommunicatorError


class Store:
    """Entries that all processes of a job read and write."""

    def __init__(self, client: Any):
        self._client = client

    def set(self, key: str, value: Any) -> None:
        """Write an entry, over an older one."""
        self._client.key_value_set(key, json.dumps(value), allow_overwrite=True)

    def entries(self, folder: str) -> list[tuple[str, Any]]:
        """Return the keys and values below a folder, as they are at one moment."""
        found = self._client.key_value_dir_get(folder)
        return [(key, json.loads(text)) for key, text in found]

    def by_process(self, folder: str) -> dict[int, Any]:
        """Return the entries of a folder whose names are numbers of processes."""
        return {
            int(key.rsplit("/", 1)[1]): value for key, value in self.entries(folder)
        }

    def wait(self, key: str, seconds: float) -> bool:
        """Wait for an entry; return whether it came in time.

        The client raises one type for all its errors. An error before the time is over
        means that the store failed, and is raised. After it, the entry is late; if the
        store failed too, the next request raises.
        """
        begin = time.monotonic()
        try:
            self._client.blocking_key_value_get(key, max(1, int(seconds * 1000)))
        except Exception:
            # The client's clock may run a little ahead of this one.
            if time.monotonic() - begin < 0.9 * seconds:
                raise
            return False
        return True


def of_job(processes: tuple[int, ...]) -> Store:
    """Return the store of this job.

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
    return Store(client)
