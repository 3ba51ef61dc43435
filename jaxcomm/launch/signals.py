"""The signals that reach the launcher, one at a time, where it waits for them."""

import os
import signal

# Those that ask for an end. The processes are in sessions of their own, which the
# terminal's SIGHUP and SIGQUIT do not reach.
_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# And that which asks for flight records, as of a process by itself.
_HEEDED = (*_REQUESTS, signal.SIGUSR1)


class Signals:
    """Catches signals while it is entered; to be used by the main thread.

    ``fileno`` becomes readable when one arrives.
    """

    def __enter__(self):
        self._requests: list[int] = []
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._previous_wakeup = signal.set_wakeup_fd(
            self._write, warn_on_full_buffer=False
        )
        self._previous = {
            number: signal.signal(number, self._note)
            for number in _HEEDED
            # nohup's choice.
            if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN)
        }
        return self

    def __exit__(self, *exception):
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        return self._read

    def take(self) -> list[int]:
        """Return what arrived since the last call: requests to end, and SIGUSR1."""
        try:
            while os.read(self._read, 512):
                pass
        except BlockingIOError:
            pass
        taken, self._requests = self._requests, []
        return taken

    def are_left(self) -> bool:
        """Say whether a request to end came that nobody took; also once it is left."""
        return any(number in _REQUESTS for number in self._requests)

    def _note(self, number, frame):
        self._requests.append(number)
