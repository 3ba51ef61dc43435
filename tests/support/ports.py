"""Ports that stay free until a test asks for them by number."""

import contextlib
import itertools
import os
import pathlib
import socket

_RANGE = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")
_COUNT = 10_000
# Of each process of the tests: those that run beside each other have numbers nearby.
_OWN = 64
_asked = itertools.count()


def free(count: int = 1) -> int:
    """Returns a loopback port that nobody has, the first of so many.

    It lies below those that the system gives to whoever asks for any. So it stays free
    though other tests start servers meanwhile.
    """
    first = int(_RANGE.read_text().split()[0]) - _COUNT
    for turn in _asked:
        port = first + (os.getpid() * _OWN + turn) % _COUNT
        with contextlib.ExitStack() as servers, contextlib.suppress(OSError):
            for each in range(port, port + count):
                servers.enter_context(socket.socket()).bind(("127.0.0.1", each))
            return port
    raise AssertionError("ports do not end")
