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

    with _on_interrupt(handler):
        try:
            yield
        except Exception as error:
            # Likely of what was left undone where it was dropped.
            if pressed:
                raise KeyboardInterrupt from error
            raise
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

    with _on_interrupt(handler):
        yield lambda: bool(pressed)


@contextlib.contextmanager
def _on_interrupt(handler):
    # A script's background job ignores Ctrl-C, which is for another.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
