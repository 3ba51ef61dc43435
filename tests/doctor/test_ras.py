"""NCCL's RAS, which a server with its protocol stands in for.

The commands, the answers and the fields of the report are those of ``src/ras`` of
NCCL's source (client.cc and client_support.cc).
"""

import json
import socket

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
    """A connection to RAS, which remembers what it was asked.

    A report that is endless takes an hour of the clock for each of its words.
    """

    address = "127.0.0.1:28028"

    def __init__(
        self, text="", *, has_json=True, greeting="SERVER PROTOCOL 2", endless_on=None
    ):
        self.asked, self.clock = [], endless_on
        of_json = "OK" if has_json else "ERROR: Unknown command"
        self.answers = {"CLIENT": f"{greeting}\n", "TIMEOUT": "OK\n", "STATUS": text}
        self.answers |= {"SET": f"{of_json}\n", "VERBOSE": text}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def settimeout(self, seconds):
        pass

    def sendall(self, line):
        self.asked.append(line.decode().strip())
        self.pending = self.answers[self.asked[-1].split()[0]].encode()

    def recv(self, size):
        if self.clock is not None and self.asked[-1] == "STATUS":
            self.clock.advance(3600)
            return b" "
        # In pieces. RAS closes after a report.
        found, self.pending = self.pending[:9], self.pending[9:]
        return found


@pytest.fixture
def serve(monkeypatch):
    """Returns ``serve(text, ...)``: a :class:`Server`, for which there is time."""
    monkeypatch.setattr(ras, "_SECONDS", waiting.HANG_SECONDS)

    def start(*args, **options):
        server = Server(*args, **options)
        monkeypatch.setattr(ras.socket, "create_connection", lambda *args: server)
        return server

    return start


def found_by(server):
    return list(ras.jobs({"NCCL_RAS_ADDR": server.address}))


def test_a_healthy_job_is_reported(serve):
    document = report([rank(0), rank(1)])
    server = serve(json.dumps(document))
    first, job, communicator = found_by(server)
    asked = ["CLIENT PROTOCOL 2", "TIMEOUT 1", "SET FORMAT json", "STATUS"]
    assert server.asked == asked
    assert first.text == f"answers at {server.address}"
    assert first.value == {"available": True, "report": document}
    assert job.text == "NCCL 2.28.9, 1 communicators at 2026-11-23 05:00:00"
    told = rows.Row("communicator 0x1f", "2 of 2 ranks answer", is_fine=True)
    assert communicator == told


RANK_1 = "rank 1 (10.0.0.1 pid 101 GPU 1)"


@pytest.mark.parametrize(
    ("ranks", "lost", "text", "is_fine"),
    [
        (
            [rank(0), rank(1, error=6), rank(2, error=7), rank(3, aborted=True)],
            [missing(4, unresponsive=True, dead=True)],
            "4 of 5 ranks answer; dead: rank 4 (10.0.0.2 pid 204 GPU 4); failed: "
            f"{RANK_1}; aborted: rank 3 (10.0.0.1 pid 103 GPU 3)",
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
            f"3 of 3 ranks answer; AllReduce #41 is the last of {RANK_1}, #42 of oth",
            None,
        ),
        ([rank(0, error=6)], [], "1 of 1 ranks answer; failed: rank 0 ", False),
        ([rank(0, aborted=1)], [], "1 of 1 ranks answer; aborted: rank 0 ", False),
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
    assert [row.text for row in lines] == text.strip().split("\n\n")


def test_another_server_is_no_job(serve):
    expected = "its report is not as expected"
    for options, reason in (
        ({"text": "{"}, expected),
        ({"text": "[]"}, f"{expected}: a list"),
        ({"text": '{"nccl_version": "2.28"}'}, "KeyError('communicators_count')"),
        ({"greeting": "HTTP/1.1 400"}, "not NCCL's RAS, and answered 'HTTP/1.1 400'"),
    ):
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
    told = f"no NCCL job answers at [127.0.0.1]:{free}: Connection refused"
    assert (row.text, row.is_fine) == (told, None)


def test_a_wrong_address_is_a_problem():
    for address in ("node7", "node7:", ":28028", "node7:http"):
        (row,) = ras.jobs({"NCCL_RAS_ADDR": address})
        told = f"NCCL_RAS_ADDR is {address!r}, which is not host:port"
        assert (row.text, row.is_fine) == (told, False)
