"""Which of some processes come and live: one answer for all, through the job's store.

Each process writes an entry when it comes, and counts itself. The last one, or one that
sees that the others have ended or has waited in vain, writes the outcome. The store
takes the first outcome, so all return the same, also those that come later.

**Cost.** A process sends three messages, and one more each time it waits in vain. The
last one reads all entries; while some are missing, about four processes of all do. With
1,024 processes that is 0.1 MB at a time.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Collection, Iterable

from jaxcomm._built import _ffi
from jaxcomm.communicator import hosts
from jaxcomm.communicator.store import Store

# How long a process waits for the outcome before it looks who came: for so long, and
# for each process so much longer, which is ten thousand messages a second at most.
_STEP_SECONDS, _SECONDS_EACH = 0.05, 1e-4
_GIVEN_UP = "jaxcomm/given-up"
# So many processes look in each step, of however many there are.
_LOOKING = 4
# How the launcher learns which processes were given up, if there is one that ends them.
_tell_launcher: Callable[[int], object] | None = None


def tell_of_given_up(tell: Callable[[int], object] | None) -> None:
    """Have ``tell(process)`` called for each process that is given up and may live."""
    global _tell_launcher
    _tell_launcher = tell


def outcome_of(store: Store, folder: str) -> list[int] | None:
    """Return which processes came and lived, None if that is open."""
    return store.get(f"{folder}/outcome")


def come(store: Store, folder: str, me: int) -> int:
    """Say that this process has come; return how many have."""
    store.set(f"{folder}/{me}", True, me)
    return store.client.key_value_increment(f"{folder}-count", 1)


def who_came(
    store: Store,
    folder: str,
    processes: Collection[int],
    me: int,
    seconds: float,
    ended: Callable[[], Collection[int]],
) -> list[int]:
    """Come, and return which of some processes came and live; the same on all.

    Args:
      store: of the job.
      folder: where they meet, once.
      processes: JAX's process indices; this process is one of them.
      me: index of this process.
      seconds: after which a process that has neither come nor ended is given up.
      ended: returns those of the processes that have ended.
    """
    key = f"{folder}/outcome"
    deadline = time.monotonic() + seconds
    looks = come(store, folder, me) + len(ended()) >= len(processes)
    outcome = None
    while outcome is None:
        if looks or random.randrange(len(processes)) < _LOOKING:
            is_late = time.monotonic() >= deadline
            came = store.entries(folder, processes)
            gone = ended()
            if is_late or {*processes} <= {*came, *gone}:
                store.set_once(key, [p for p in came if p not in gone], me)
                return store.get(key)
        looks = False
        outcome = store.wait(key, _STEP_SECONDS + len(processes) * _SECONDS_EACH)
    return outcome


def give_up(processes: Iterable[int]) -> None:
    """Tell the launcher of processes that others go on without: it ends them."""
    if _tell_launcher is not None:
        for process in processes:
            _tell_launcher(process)


def given_up(store: Store, processes: Iterable[int]) -> set[int]:
    """Return those of some processes that :func:`end` is about to end, or has ended."""
    return {*store.entries(_GIVEN_UP, processes)}


def end(store: Store, processes: Collection[int], me: int) -> None:
    """End processes that others go on without, and that may compute with them.

    The launcher does. Where none does, this process ends those of its host.
    """
    # First: the launcher's question may wake one, and it could still come to others.
    for process in processes:
        store.set(f"{_GIVEN_UP}/{process}", True, me)
    if _tell_launcher is not None:
        give_up(processes)
        return
    own = hosts.infos((me,))[me]
    for info in hosts.infos(tuple(processes)).values():
        if not info.is_visible_from(own):
            continue
        with contextlib.suppress(OSError):  # It has ended, or is another user's.
            process = os.pidfd_open(info.pid)
            try:
                if _ffi.process_start_time(info.pid) == info.start:
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            finally:
                os.close(process)
