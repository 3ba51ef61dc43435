"""A port for the coordinator that nobody else takes before process 0 does."""

import contextlib
import socket
from collections.abc import Iterator

from jaxcomm.launch.environment import LOOPBACK


class PortTaken(Exception):
    """The port asked for is in use; the text says so."""


@contextlib.contextmanager
def reserved(port: int) -> Iterator[int]:
    """Keep a loopback port; yields its number.

    The kernel gives it to nobody who asks for any port. Process 0 can still bind it,
    since gRPC sets SO_REUSEPORT too, and connections go to it: the socket here does not
    listen.

    Args:
      port: If 0, a free one.

    Raises:
      PortTaken: another process serves on it.
    """
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            keeper.bind((LOOPBACK, port))
        except OSError as error:
            raise PortTaken(
                f"port {port} cannot be had: {error.strerror}. Leave out "
                "--coordinator-port for a free one"
            ) from None
        yield keeper.getsockname()[1]


class Ports:
    """A port for each attempt; to be entered.

    Args:
      asked: of all of them. If 0, each has a free one, not that of the one before.
    """

    def __init__(self, asked: int):
        self._asked = asked
        self._held = contextlib.ExitStack()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._held.close()

    def next(self) -> int:
        """Return the port of the next attempt.

        Raises:
          PortTaken: another process serves on it.
        """
        before = self._held
        self._held = contextlib.ExitStack()
        # Once the next one is reserved: the kernel would give the same again.
        with before:
            return self._held.enter_context(reserved(self._asked))
