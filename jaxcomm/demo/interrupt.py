"""Ctrl-C that waits for a good moment."""

import contextlib
import signal
from collections.abc import Callable, Iterator


class Interrupted(Exception):
    """The user pressed Ctrl-C during training; the message says what was saved."""


@contextlib.contextmanager
def kept_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt at Ctrl-C, or at the end where it was dropped.

    Python drops what is raised in a finalizer and in the callback of a weak reference,
    of which JAX has many while it traces.
    """
    pressed = []

    def handler(signal_number, frame):
        pressed.append(signal_number)
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pressed:
        raise KeyboardInterrupt


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
