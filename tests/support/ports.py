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


def free() -> int:
    """Returns a loopback port that nobody has.

    It lies below those that the system gives to whoever asks for any. So it stays free
    though other tests start servers meanwhile.
    """
    first = int(_RANGE.read_text().split()[0]) - _COUNT
    for turn in _asked:
        port = first + (os.getpid() * _OWN + turn) % _COUNT
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port
    raise AssertionError("ports do not end")
