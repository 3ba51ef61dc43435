"""NCCL's RAS, for which a server with the lines of client_support.cc stands in."""

import itertools
import socket
import threading

import pytest
import waiting

from jaxcomm.doctor import ras, rows

GREETING = "SERVER PROTOCOL 2\n"
REPORT = "NCCL version 2.28.9\n\nErrors\n======\n\n#0-0 (dead)\x1b[31m INCOMPLETE\n"


@pytest.fixture
def serve(monkeypatch):
    """Returns ``serve(*answers)``: what it was asked, line by line."""
    threads = []

    def start(*answers):
        asked, server = [], socket.create_server(("127.0.0.1", 0))
        server.settimeout(waiting.HANG_SECONDS)
        monkeypatch.setenv("NCCL_RAS_ADDR", f"127.0.0.1:{server.getsockname()[1]}")

        def answer():
            with server, server.accept()[0] as connection:
                lines = connection.makefile("r")
                for text in answers:
                    asked.append(lines.readline().strip())
                    try:
                        for part in [text] if isinstance(text, str) else text:
                            connection.sendall(part.encode())
                    except OSError:
                        return  # the doctor has heard enough

        threads.append(threading.Thread(target=answer))
        threads[-1].start()
        return asked

    yield start
    for thread in threads:
        thread.join()


def test_the_report_of_a_job_is_shown(serve):
    asked = serve(GREETING, "OK\n", REPORT)
    row = ras.job()
    assert asked == ["CLIENT PROTOCOL 2", "TIMEOUT 5", "VERBOSE STATUS"]
    assert row.is_fine is None
    text = rows.text({"NCCL job": [row]})
    assert r"#0-0 (dead)\x1b[31m INCOMPLETE" in text.splitlines()[-3]
    assert rows.to_json({"NCCL job": [row]})["NCCL job"]["RAS"].count("\n") == 5


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        (["HTTP/1.1 400 Bad Request\n"], "it answers 'CLIENT PROTOCOL 2' by 'HTTP"),
        ([""], "it answers 'CLIENT PROTOCOL 2' by ''"),
        ([GREETING, "ERROR: Unknown\n"], "it answers 'TIMEOUT 5' by 'ERROR"),
    ],
)
def test_another_server_is_told_from_it(serve, answers, text):
    serve(*answers)
    assert text in ras.job().text


def test_a_report_without_end_is_cut_and_a_silent_server_is_left(serve, monkeypatch):
    serve(GREETING, "OK\n", itertools.repeat("x" * 4096))
    assert ras._MOST_BYTES <= len(ras.job().text) <= 2 * ras._MOST_BYTES
    # Its backlog takes the connection, and nobody answers.
    monkeypatch.setattr(ras, "_SECONDS", 0.0)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        socket.create_connection(silent.getsockname()) as connection,
        pytest.raises(TimeoutError, match="no whole answer within 0 s"),
    ):
        ras._read(connection, 0.0)


def test_where_nobody_listens_it_says_so(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
    for given, text in ((address, "nobody answers at"), ("here", "here: no address")):
        monkeypatch.setenv("NCCL_RAS_ADDR", given)
        assert text in ras.job().text
