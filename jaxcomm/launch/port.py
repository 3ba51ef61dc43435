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
