"""When a process may stop NCCL after a failure: once all others expect it.

A kernel of NCCL that is stopped tells its peers of steps whose bytes it never wrote. If
a peer took them for data, its program would read wrong numbers. So each process first
poisons what it runs, then writes an entry in the store, and waits for the entries of
all others. A process that has ended, or closed its communicators, computes nothing any
more.
"""

import contextlib
import threading
import time
from typing import Any

from jaxcomm.communicator import hosts
from jaxcomm.communicator.store import seal

_FOLDER = "jaxcomm/settled"
# Each look is a message to the coordinator, of every process and only after a failure.
_LOOK_SECONDS = 0.05
# The extension ends the process before.
_GIVE_UP_SECONDS = 30.0
# The end of the process must not wait for a coordinator that has ended.
_JOIN_SECONDS = 2.0

_is_over = threading.Event()
_threads: list[threading.Thread] = []


def settle(
    store: Any, world: str, process: int, processes: tuple[int, ...], health: Any
) -> None:
    """Say that this process computes nothing over a world, and wait for the others.

    A thread of its own waits, and only if there may be something to stop.

    Args:
      store: of the job, see :class:`jaxcomm.communicator.failures.FailureWatch`.
      world: its name, the same on all of its processes.
      process: this process, as JAX numbers them.
      processes: that share the world.
      health: has ``is_broken()``, ``gone()``, the processes that have ended, and
        ``settle()``, which lets this process stop NCCL.
    """
    folder = f"{_FOLDER}/{world}/"

    def tell():
        entry = seal(process, True)
        store.key_value_set(f"{folder}{process}", entry, allow_overwrite=True)

    if not health.is_broken():
        with contextlib.suppress(Exception):  # The store goes with the job.
            tell()
        return
    others = {f"{folder}{other}": other for other in processes if other != process}
    thread = threading.Thread(
        target=_wait, args=(store, folder, tell, others, health),
        name="jaxcomm-settling", daemon=True,
    )  # fmt: skip
    _threads[:] = [each for each in _threads if each.is_alive()]
    _threads.append(thread)
    thread.start()


def stop() -> None:
    """Wait no longer: this process ends."""
    _is_over.set()
    for thread in _threads:
        thread.join(_JOIN_SECONDS)


def _wait(store, folder, tell, others, health):
    end = time.monotonic() + _GIVE_UP_SECONDS
    is_told = False
    while time.monotonic() < end:
        with contextlib.suppress(Exception):  # The store may come back.
            if not is_told:
                tell()
                is_told = True
            found = {key for key, _ in store.key_value_dir_get(folder)}
            gone = {*health.gone(), *hosts.told_ends()}
            if {others[key] for key in others.keys() - found} <= gone:
                health.settle()
                return
        if _is_over.wait(_LOOK_SECONDS):
            return
