"""What NCCL's RAS says of the NCCL job that runs on this machine, if one does.

Since NCCL 2.24 a thread of each process of a job knows the whole job and listens at
``localhost:28028``, or where ``NCCL_RAS_ADDR`` says. It answers lines of text with
lines of text, and ``STATUS`` with a report, after which it closes. This is what
``src/ras`` of NCCL's source does. An older NCCL has text alone, and no JSON.
"""

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from jaxcomm.diagnostics import table
from jaxcomm.doctor.rows import Row

_ADDRESS = "localhost:28028"
# All of it, and what NCCL may wait for its other processes.
_SECONDS, _THEIR_SECONDS = 2.0, 1
_PROTOCOL = 2
# Of ncclResult_t: no error.
_SUCCESS, _IN_PROGRESS = 0, 7
# Ranks to name one by one.
_MOST_NAMED = 8


class _Refused(Exception):
    """RAS could not be asked; the text says why."""


def jobs(environment: Mapping[str, str] = os.environ) -> Iterator[Row]:
    """Yield what RAS reports; one row that says so where nothing answers."""
    address = environment.get("NCCL_RAS_ADDR") or _ADDRESS
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        text = f"NCCL_RAS_ADDR is {address!r}, which is not host:port"
        yield Row("RAS", text, {"available": False, "reason": text}, False)
        return
    try:
        report = _ask(host.strip("[]"), int(port))
        rows = list(_rows(report))
    except (OSError, OverflowError, _Refused) as error:
        reason = getattr(error, "strerror", None) or str(error)
        text = f"no NCCL job answers at {address}: {reason}"
        yield Row("RAS", text, {"available": False, "reason": reason})
        return
    yield Row("RAS", f"answers at {address}", {"available": True, "report": report})
    yield from rows


def _ask(host: str, port: int) -> str | dict[str, Any]:
    """Return the report: a document, or the text of an NCCL that writes no JSON."""
    deadline = time.monotonic() + _SECONDS
    with socket.create_connection((host, port), _SECONDS) as connection:
        lines = _Lines(connection, deadline)
        greeting = lines.answer(f"CLIENT PROTOCOL {_PROTOCOL}")
        if not greeting.startswith("SERVER PROTOCOL "):
            raise _Refused(f"it is not NCCL's RAS, and answered {greeting[:60]!r}")
        # An NCCL that does not know these goes on as before.
        lines.answer(f"TIMEOUT {_THEIR_SECONDS}")
        has_json = lines.answer("SET FORMAT json") == "OK"
        report = lines.rest("STATUS" if has_json else "VERBOSE STATUS")
    if not has_json:
        return report
    try:
        found = json.loads(report)
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__}")
    except ValueError as error:
        raise _Refused(f"its report is not as expected: {error}") from None
    return found


class _Lines:
    """A conversation in lines that ends at a point in time."""

    def __init__(self, connection: socket.socket, deadline: float):
        self._connection, self._deadline = connection, deadline
        self._pending = b""

    def answer(self, line: str) -> str:
        self._send(line)
        while b"\n" not in self._pending:
            if not self._receive():
                raise _Refused(f"it closed the connection after {line!r}")
        found, _, self._pending = self._pending.partition(b"\n")
        return found.decode(errors="replace").strip()

    def rest(self, line: str) -> str:
        self._send(line)
        while self._receive():
            pass
        return self._pending.decode(errors="replace")

    def _send(self, line: str) -> None:
        self._patience()
        self._connection.sendall(f"{line}\n".encode())

    def _receive(self) -> bool:
        self._patience()
        received = self._connection.recv(1 << 16)
        self._pending += received
        return bool(received)

    def _patience(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no answer within {_SECONDS:g} s")
        self._connection.settimeout(left)


def _rows(report: str | dict[str, Any]) -> Iterator[Row]:
    if isinstance(report, str):
        for line in filter(None, map(str.strip, report.splitlines())):
            yield Row("report", line)
        return
    try:
        yield Row(
            "job",
            f"NCCL {report['nccl_version']}, {report['communicators_count']} "
            f"communicators at {report['timestamp']}",
        )
        for communicator in report["communicators"]:
            yield _communicator(communicator)
    except (KeyError, TypeError, AttributeError) as error:
        raise _Refused(f"its report is not as expected: {error!r}") from None


def _communicator(found: dict[str, Any]) -> Row:
    ranks, missing = found["ranks"], found["missing_ranks"]
    dead = [rank for rank in missing if rank["status"]["considered_dead"]]
    silent = [rank for rank in missing if rank["status"]["unresponsive"]]
    silent = [rank for rank in silent if rank not in dead]
    absent = [rank for rank in missing if rank not in dead and rank not in silent]
    aborted = [rank for rank in ranks if rank["status"]["abort_flag"]]
    failed = [
        rank
        for rank in ranks
        if rank["status"]["async_error"] not in (_SUCCESS, _IN_PROGRESS)
    ]
    said = [
        (dead, "dead"),
        (failed, "failed"),
        (aborted, "aborted"),
        (silent, f"silent for {_THEIR_SECONDS} s"),
        (absent, "not there yet, or gone"),
    ]
    parts = [f"{len(ranks)} of {found['size']} ranks answer"]
    parts += [f"{what}: {_named(who)}" for who, what in said if who]
    parts += _behind(ranks)
    is_fine = False if dead or failed or aborted else True if not parts[1:] else None
    return Row(f"communicator {found['hash']}", "; ".join(parts), is_fine=is_fine)


def _behind(ranks) -> Iterator[str]:
    """Yield the collectives that some ranks have begun and others have not."""
    counts: dict[str, dict[int, list]] = {}
    for rank in ranks:
        for name, count in rank["collective_counts"].items():
            counts.setdefault(name, {}).setdefault(count, []).append(rank)
    for name, by_count in counts.items():
        if len(by_count) > 1:
            least = min(by_count)
            yield (
                f"{name} #{least} is the last of {_named(by_count[least])}, "
                f"#{max(by_count)} of others"
            )


def _named(ranks) -> str:
    numbers = table.numbers(rank["rank"] for rank in ranks)
    if len(ranks) > _MOST_NAMED:
        return f"ranks {numbers}"
    places = ", ".join(
        f"{rank['host']} pid {rank['pid']} GPU {rank['cuda_dev']}" for rank in ranks
    )
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers} ({places})"
