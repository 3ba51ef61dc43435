"""What NCCL's RAS says of the GPU job that runs here, by its protocol of lines."""

import os
import socket
import time

from jaxcomm.communicator import text_table as table
from jaxcomm.doctor.rows import Row

_ADDRESS = "localhost:28028"
# RAS gives up on a process that does not answer it sooner.
_SECONDS, _THEIR_SECONDS = 15.0, 5
_MOST_BYTES = 1 << 20


def job() -> Row:
    """Return the report of RAS, or why there is none.

    It is no verdict: RAS also says OK of a collective that times out.
    """
    address = os.environ.get("NCCL_RAS_ADDR") or _ADDRESS
    host, _, port = address.rpartition(":")
    try:
        if not port.isdecimal():
            raise ValueError("no address. Set NCCL_RAS_ADDR to host:port")
        lines = _asked(host.strip("[]"), int(port)).splitlines()
    except ConnectionRefusedError:
        return Row("RAS", f"nobody answers at {address}: no job of NCCL 2.24 or newer")
    except (OSError, ValueError, OverflowError) as error:
        return Row("RAS", f"{address}: {error}")
    return Row("RAS", "\n".join(table.plain(line.rstrip()) for line in lines))


def _asked(host: str, port: int) -> str:
    deadline = time.monotonic() + _SECONDS
    with socket.create_connection((host, port), _SECONDS) as connection:
        for asked, meant in (
            ("CLIENT PROTOCOL 2", "SERVER PROTOCOL "),
            (f"TIMEOUT {_THEIR_SECONDS}", "OK"),
        ):
            connection.sendall(f"{asked}\n".encode())
            if not (answer := _read(connection, deadline, b"\n")).startswith(meant):
                raise ValueError(
                    f"it answers {asked!r} by {answer[:60]!r}, unlike RAS. Set "
                    "NCCL_RAS_ADDR to the address of RAS"
                )
        connection.sendall(b"VERBOSE STATUS\n")
        return _read(connection, deadline)


def _read(connection: socket.socket, deadline: float, end: bytes = b"") -> str:
    """Return a line, or all until the other side closes."""
    found = b""
    while not (end and found.endswith(end)) and len(found) < _MOST_BYTES:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(
                f"no whole answer within {_SECONDS:g} s. Run `ncclras -v` instead"
            )
        connection.settimeout(left)
        if not (piece := connection.recv(1 << 16)):
            break
        found += piece
    return found.decode(errors="replace").strip()
