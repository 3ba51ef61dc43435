"""Waiting in tests: for events, never for the clock.

A test ends its waits by what happens: a line that a process prints, an event, a
condition. :data:`HANG_SECONDS` guards each wait. It only tells a hang from a slow
machine, so no outcome may depend on it. `tools/test_waits.py`, part of `make lint`,
refuses the clock, sleeps and short timeouts in all other files of `tests/`.

Programs that tests start may import this module too.
"""

import threading
import time

HANG_SECONDS = 120.0
"""The hang guard, in seconds: a wait that takes this long will never end."""

EXPIRES_SECONDS = 2.0
"""A timeout that is meant to expire, in seconds, since nothing can end that wait.

A test passes it to the product. Nothing else may have to happen within it.
"""

_LOOK_SECONDS = 0.002


def until(condition, what="the condition", process=None):
    """Look until ``condition()`` is true, and return what it returns.

    Args:
      condition: a function without arguments.
      what: names the condition if it never comes true.
      process: a ``subprocess.Popen``. If it ends, the condition cannot come true.

    Raises:
      AssertionError: if the guard expires, or the process ends before.
    """
    guard = time.monotonic() + HANG_SECONDS
    while not (value := condition()):
        if process is not None and process.poll() is not None:
            # It may have ended right after it made the condition true.
            if value := condition():
                return value
            raise AssertionError(f"{what}: the process ended with {process.returncode}")
        assert time.monotonic() < guard, f"{what}: not after {HANG_SECONDS:g} s"
        time.sleep(_LOOK_SECONDS)
    return value


def event(happened, what="the event"):
    assert happened.wait(HANG_SECONDS), f"{what}: not after {HANG_SECONDS:g} s"


def time_of_day():
    """Return the time in seconds, the same for all processes: for figures to print."""
    return time.time()


def dawdle(seconds):
    """Do nothing for a time. No test may wait for its end, or need that it be short."""
    time.sleep(seconds)


def joined(*threads):
    for thread in threads:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive(), f"{thread.name} runs after {HANG_SECONDS:g} s"


def ended(process, given=None):
    """Return what a ``subprocess.Popen`` printed, once it has ended.

    Args:
      process: the process, killed if it hangs.
      given: what to write to its standard input.

    Returns:
      Its output and its errors, as of ``communicate``.
    """
    try:
        return process.communicate(given, timeout=HANG_SECONDS)
    except BaseException:
        process.kill()
        raise


def forever():
    """Block this thread for good: the program is to be killed or interrupted here."""
    while True:
        threading.Event().wait(HANG_SECONDS)


class Clock:
    """A clock that the test moves. Give it to what takes ``time`` or a clock.

    Attributes:
      now: what it shows, in seconds.
      slept: the seconds of each ``sleep``.
    """

    def __init__(self, now=1000.0):
        self.now = now
        self.slept = []

    def monotonic(self):
        return self.now

    time = perf_counter = monotonic

    def advance(self, seconds):
        self.now += seconds

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds
