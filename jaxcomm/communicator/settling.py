"""When a process may stop NCCL after a failure: once no other computes with it.

A kernel of NCCL that is stopped tells its peers of steps whose bytes it never wrote. If
a peer took them for data, its program would read wrong numbers. So each process first
poisons what it runs, and then says so. A process that has ended, or closed its
communicators, computes nothing any more. One that says nothing is stopped, or stuck
where it cannot speak: the others give it up, and wait until it is killed. The launcher
kills it. Without one its neighbors on the same host do. Nobody can kill a process of
another host then, and the extension ends those that wait.
"""

import contextlib
import threading
import time
from typing import Any

from jaxcomm._built import _ffi
from jaxcomm.communicator import hosts, presence
from jaxcomm.communicator.out_of_step import names
from jaxcomm.communicator.store import Store

_FOLDER = "jaxcomm/settled"
# For a process to say that it knows. Its thread looks three times a second, and needs
# Python's lock; the last of many processes is behind the messages of all others.
_ANSWER_SECONDS, _SECONDS_EACH = 2.0, 0.002
_LOOK_SECONDS = 0.05
# The extension ends the process before.
_GIVE_UP_SECONDS = 30.0
# The end of the process must not wait for a coordinator that has ended.
_JOIN_SECONDS = 2.0

_is_over = threading.Event()
_threads: list[threading.Thread] = []


def settle(
    store: Store, world: str, process: int, processes: tuple[int, ...], health: Any
) -> None:
    """Say that this process computes nothing over a world, and wait for the others.

    A thread of its own waits, and only if there may be something to stop.

    Args:
      store: of the job.
      world: its name, the same on all of its processes.
      process: this process, as JAX numbers them.
      processes: that share the world.
      health: has ``is_broken()``, ``gone()``, the processes that have ended, and
        ``settle()``, which lets this process stop NCCL.
    """
    folder = f"{_FOLDER}/{world}"
    if not health.is_broken():
        with contextlib.suppress(Exception):  # The store goes with the job.
            presence.come(store, folder, process)
            _end_if_late(presence.outcome_of(store, folder), process)
        return
    thread = threading.Thread(
        target=_wait, args=(store, folder, process, processes, health),
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


def _wait(store, folder, me, processes, health):
    def ended():
        if _is_over.is_set():
            raise _Over
        return {*processes} & {*health.gone(), *hosts.told_ends()}

    end = time.monotonic() + _GIVE_UP_SECONDS
    seconds = _ANSWER_SECONDS + len(processes) * _SECONDS_EACH
    came, is_told = None, False
    while time.monotonic() < end and not _is_over.wait(_LOOK_SECONDS):
        with contextlib.suppress(Exception):  # The store may come back.
            if came is None:
                came = presence.who_came(store, folder, processes, me, seconds, ended)
                _end_if_late(came, me)
            silent = {*processes} - {*came} - ended()
            if not silent:
                health.settle()
                return
            if not is_told:
                presence.end(store, silent, me)
                is_told = True


def _end_if_late(came, me):
    """End this process if the others have given it up: its numbers may be wrong."""
    if came is not None and me not in came:
        _ffi.end_process(
            f"process {me} came too late: a collective failed, this process did not "
            f"say that it knows, and {names(came)} go on without it"
        )


class _Over(Exception):
    """This process ends."""
