"""The ports that the launcher serves on, or lets process 0 serve on."""

import contextlib
import socket
from collections.abc import Iterator

from jaxcomm.launch.environment import LOOPBACK


class PortTaken(Exception):
    """This host cannot serve on a port; the text names the option and the reason."""


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
                f"--coordinator-port: port {port} cannot be had: {error.strerror}. "
                "Leave it out for a free one"
            ) from None
        yield keeper.getsockname()[1]


def bound(host: str, port: int) -> socket.socket:
    """Return a socket at a port of ``--coordinator``; it does not listen yet.

    Raises:
      PortTaken: another process serves there, or the address is not of this host.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise PortTaken(
            f"--coordinator: {host} port {port} cannot be had: {error.strerror}. Give "
            "an address of host 0, and a port that is free, with the next one"
        ) from None
    return found
