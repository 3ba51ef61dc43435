"""At exit, wait briefly for programs that still communicate, then close all."""

import atexit
import contextlib
import multiprocessing.util
import sys
import time
from collections.abc import Callable, Iterable

import jax

from jaxcomm._built import _ffi
from jaxcomm.communicator import cache, extension, forks, settling
from jaxcomm.communicator.communicator import Communicator
from jaxcomm.errors import CommunicatorError

# A process that ends early takes its collectives from the others, which then report a
# failure. A collective that hangs must not delay the end. So there are two bounds: on
# the time in which collectives wait and none ends, and on all of it.
_MOST_SECONDS = 2.0
_MOST_SECONDS_OF_PROGRESS = 30.0
_LOOK_SECONDS = 0.005
# In a row: between two collectives a program is quiet for a moment, which is longer on
# shared cores.
_QUIET_LOOKS = 10
# Python 3.13 calls both what atexit and what multiprocessing knows.
_has_ended = False


def wait_for_work(
    members: Iterable[Communicator], most_seconds: float = _MOST_SECONDS
) -> bool:
    """Wait until this process does nothing that other processes wait for.

    An array that is not yet computed shows that a program runs. If nobody keeps its
    results, only its collectives show it. Then this misses a program that computes for
    long before its next collective.

    Args:
      members: the live communicators. Those within the process are skipped.
      most_seconds: how long to wait while collectives are in flight and none ends.

    Returns:
      Whether all is done. False at once after an exception that nobody caught: the
      other processes may never come.
    """
    members = [member for member in members if member.neighbors is not None]
    if not members:
        return True
    if getattr(sys, "last_value", None) is not None:
        return False
    now = time.monotonic()
    deadline, last = now + most_seconds, now + _MOST_SECONDS_OF_PROGRESS
    seen, quiet = None, 0
    while quiet < _QUIET_LOOKS:
        now = time.monotonic()
        if now > min(deadline, last):
            return False
        stats = [member.stats() for member in members]
        calls = [each["calls"] for each in stats]
        waits = any(each["in_flight"] for each in stats)
        is_computing = _is_computing()
        quiet = 0 if calls != seen or waits or is_computing else quiet + 1
        # What computes and waits for nobody comes to its next collective.
        if calls != seen or (is_computing and not waits):
            deadline = now + most_seconds
        seen = calls
        time.sleep(_LOOK_SECONDS)
    return True


def _is_computing() -> bool:
    return any(map(_is_pending, jax.live_arrays("cpu")))


def _is_pending(array) -> bool:
    # It may be deleted or have failed meanwhile.
    with contextlib.suppress(RuntimeError, ValueError):
        return not array.is_ready()
    return False


def _at_exit() -> None:
    global _has_ended
    if _has_ended or not forks.may_take_part():
        return
    _has_ended = True
    try:
        with contextlib.suppress(Exception):  # nobody is left to handle it
            wait_for_work(cache.communicators())
    finally:
        # Ranks still waiting raise instead of holding the process up.
        cache.finalize_at_exit(_MOST_SECONDS)
        settling.stop()
        with contextlib.suppress(CommunicatorError):  # without the extension
            _ffi.wait_for_aborts(_MOST_SECONDS)
        with contextlib.suppress(Exception):
            extension.dump_at_end()


def prepare() -> None:
    """Have this process end its communicators at exit, as do those that it starts."""
    atexit.register(_at_exit)
    # Children of a fork server forget what atexit knows. The server may have loaded
    # this before it forks them.
    if multiprocessing.parent_process() is not None:
        _end_with_target(_at_exit)
    multiprocessing.util.register_after_fork(_at_exit, _end_with_target)


def _end_with_target(end: Callable[[], None]) -> None:
    multiprocessing.util.Finalize(None, end, exitpriority=0)
