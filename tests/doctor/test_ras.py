"""NCCL's RAS, which a server with its protocol stands in for.

The commands, the answers and the fields of the report are those of ``src/ras`` of
NCCL's source (client.cc and client_support.cc).
"""

import contextlib
import json
import socket
import threading

import ports
import pytest
import waiting

from jaxcomm.doctor import ras, rows


def rank(number, *, error=0, aborted=False, reductions=42):
    return {
        "rank": number, "host": "10.0.0.1", "pid": 100 + number, "cuda_dev": number,
        "nvml_dev": number,
        "status": {
            "init_state": 0, "async_error": error, "finalize_called": False,
            "destroy_flag": False, "abort_flag": aborted,
        },
        "collective_counts": {"Broadcast": 0, "AllReduce": reductions},
    }  # fmt: skip


def missing(number, *, dead=False, unresponsive=False):
    return {
        "rank": number, "host": "10.0.0.2", "pid": 200 + number, "cuda_dev": number,
        "nvml_dev": number,
        "status": {"unresponsive": unresponsive, "considered_dead": dead},
    }  # fmt: skip


def report(ranks, missing_ranks=()):
    return {
        "nccl_version": "2.28.9", "cuda_runtime_version": 13000,
        "cuda_driver_version": 13000, "timestamp": "2026-11-23 05:00:00",
        "communicators_count": 1,
        "communicators": [{
            "hash": "0x1f", "secondary_hash": "0x2:0x3",
            "size": len(ranks) + len(missing_ranks), "ranks_count": len(ranks),
            "missing_ranks_count": len(missing_ranks), "ranks": list(ranks),
            "missing_ranks": list(missing_ranks),
        }],
        "ras": {"collection_time_sec": 0.01, "timeouts_count": 0},
    }  # fmt: skip


class Server:
    """Answers one client line by line, and remembers what it was asked.

    A report that is endless takes an hour of the clock for each of its words.
    """

    def __init__(
        self, text, *, has_json=True, greeting="SERVER PROTOCOL 2", endless_on=None
    ):
        self.text, self.has_json, self.greeting = text, has_json, greeting
        self.asked, self.clock = [], endless_on
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        with contextlib.suppress(OSError):
            client, _ = self._socket.accept()
            with client, client.makefile("rw") as stream:
                for line in stream:
                    self.asked.append(line.strip())
                    if line.upper().strip() in ("STATUS", "VERBOSE STATUS"):
                        stream.write(self.text)
                        while self.clock is not None:  # until the client has gone
                            self.clock.advance(3600)
                            stream.write(" ")
                            stream.flush()
                        return  # RAS closes after a report.
                    stream.write(f"{self._answer(line.strip().upper())}\n")
                    stream.flush()

    def _answer(self, line):
        if line.startswith("CLIENT PROTOCOL "):
            return self.greeting
        if line.startswith("SET FORMAT ") and not self.has_json:
            return f"ERROR: Unknown command {line}"
        return "OK"

    def close(self):
        # Wakes up accept, which close alone does not.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


@pytest.fixture
def serve(monkeypatch):
    """Returns ``serve(text, ...)``: a :class:`Server`, for which there is time."""
    monkeypatch.setattr(ras, "_SECONDS", waiting.HANG_SECONDS)
    servers = []

    def start(text="", **options):
        servers.append(Server(text, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def found_by(server):
    return list(ras.jobs({"NCCL_RAS_ADDR": server.address}))


def test_a_healthy_job_is_reported(serve):
    document = report([rank(0), rank(1)])
    server = serve(json.dumps(document))
    first, job, communicator = found_by(server)
    assert server.asked == [
        "CLIENT PROTOCOL 2", "TIMEOUT 1", "SET FORMAT json", "STATUS",
    ]  # fmt: skip
    assert first.text == f"answers at {server.address}"
    assert first.value == {"available": True, "report": document}
    assert job.text == "NCCL 2.28.9, 1 communicators at 2026-11-23 05:00:00"
    assert communicator == rows.Row(
        "communicator 0x1f", "2 of 2 ranks answer", is_fine=True
    )


@pytest.mark.parametrize(
    ("ranks", "lost", "text", "is_fine"),
    [
        (
            [rank(0), rank(1, error=6), rank(2, error=7), rank(3, aborted=True)],
            [missing(4, unresponsive=True, dead=True)],
            "4 of 5 ranks answer; dead: rank 4 (10.0.0.2 pid 204 GPU 4); failed: rank "
            "1 (10.0.0.1 pid 101 GPU 1); aborted: rank 3 (10.0.0.1 pid 103 GPU 3)",
            False,
        ),
        (
            [rank(0)],
            [missing(1, unresponsive=True), missing(2)],
            "1 of 3 ranks answer; silent for 1 s: rank 1 (10.0.0.2 pid 201 GPU 1); not "
            "there yet, or gone: rank 2 (10.0.0.2 pid 202 GPU 2)",
            None,
        ),
        (
            [rank(0), rank(1, reductions=41), rank(2)],
            [],
            "3 of 3 ranks answer; AllReduce #41 is the last of rank 1 (10.0.0.1 pid "
            "101 GPU 1), #42 of others",
            None,
        ),
        *(
            ([rank(0, **trouble)], [], f"1 of 1 ranks answer; {text}: rank 0 ", False)
            for trouble, text in (({"error": 6}, "failed"), ({"aborted": 1}, "aborted"))
        ),
        (
            [rank(i) for i in range(4)],
            [missing(i, dead=True) for i in range(4, 20)],
            "4 of 20 ranks answer; dead: ranks 4-19",
            False,
        ),
    ],
)
def test_ranks_in_trouble_are_named(serve, ranks, lost, text, is_fine):
    *_, row = found_by(serve(json.dumps(report(ranks, lost))))
    assert row.text.startswith(text)
    assert row.is_fine is is_fine


def test_an_nccl_without_json_is_quoted(serve):
    text = "NCCL version 2.26.2 compiled with CUDA 12.8\n\nJob summary\n"
    server = serve(text, has_json=False)
    first, *lines = found_by(server)
    assert server.asked[-1] == "VERBOSE STATUS"
    assert first.value == {"available": True, "report": text}
    assert [row.text for row in lines] == [
        "NCCL version 2.26.2 compiled with CUDA 12.8", "Job summary",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"text": "{", "greeting": "SERVER PROTOCOL 2"}, "its report is not as expe"),
        ({"text": "[]"}, "its report is not as expected: a list"),
        ({"text": '{"nccl_version": "2.28"}'}, "KeyError('communicators_count')"),
        ({"greeting": "HTTP/1.1 400"}, "not NCCL's RAS, and answered 'HTTP/1.1 400'"),
    ],
)
def test_another_server_is_no_job(serve, options, reason):
    (row,) = found_by(serve(**options))
    assert "no NCCL job answers at 127.0.0.1:" in row.text
    assert reason in row.value["reason"]
    assert row.is_fine is None


def test_a_silent_server_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(ras, "_SECONDS", waiting.EXPIRES_SECONDS)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (row,) = ras.jobs({"NCCL_RAS_ADDR": f"127.0.0.1:{silent.getsockname()[1]}"})
    assert row.value["available"] is False
    assert "timed out" in row.text


def test_a_report_without_end_is_not_waited_for(serve, monkeypatch):
    clock = waiting.Clock()
    monkeypatch.setattr(ras, "time", clock)
    server = serve("{", endless_on=clock)
    (row,) = found_by(server)
    assert server.asked[-1] == "STATUS"
    assert row.text.endswith(f": no answer within {waiting.HANG_SECONDS:g} s")


def test_without_a_job_one_row_says_so():
    free = ports.free()
    (row,) = ras.jobs({"NCCL_RAS_ADDR": f"[127.0.0.1]:{free}"})
    assert row.text == (
        f"no NCCL job answers at [127.0.0.1]:{free}: Connection refused"
    )
    assert row.is_fine is None


@pytest.mark.parametrize("address", ["node7", "node7:", ":28028", "node7:http"])
def test_a_wrong_address_is_a_problem(address):
    (row,) = ras.jobs({"NCCL_RAS_ADDR": address})
    assert row.text == f"NCCL_RAS_ADDR is {address!r}, which is not host:port"
    assert row.is_fine is False
