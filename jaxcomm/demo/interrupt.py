"""Ctrl-C that waits for a good moment."""

import contextlib
import signal
from collections.abc import Callable, Iterator


class Interrupted(Exception):
    """The user pressed Ctrl-C during training; the message says what was saved."""


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Note Ctrl-C instead of raising; a second Ctrl-C raises KeyboardInterrupt.

    Raised in the middle of a step it would leave a state that is half donated.

    Yields:
      A function that says whether Ctrl-C was pressed.
    """
    pressed = []

    def handler(signal_number, frame):
        if pressed:
            raise KeyboardInterrupt
        pressed.append(signal_number)

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, previous)
