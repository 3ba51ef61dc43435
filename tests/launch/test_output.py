import fcntl
import os
import subprocess
import sys
import threading

import pytest
import waiting

from jaxcomm.launch.output import Lines, Pump


def test_every_line_gets_the_prefix_and_waits_for_its_end():
    lines = Lines(b"> ")
    assert lines.add(b"one\n\ntw") == b"> one\n> \n"
    assert lines.add(b"o") == b""
    assert lines.add(b"\nthree") == b"> two\n"
    assert lines.end() == b"> three\n"
    assert lines.end() == b""
    # Bytes that are no text pass.
    assert Lines(b"").add(b"\xff\x00\r\n") == b"\xff\x00\r\n"
    # A line without end is cut rather than kept.
    written = b"".join(lines.add(b"x" * 65536) for _ in range(64))
    assert written.count(b"x") == 64 * 65536


def test_lines_of_many_writers_stay_whole():
    # Two pumps to one pipe, as with 2>&1. A small and slow one: a write is done in
    # several parts, between which the other pump could write.
    shown, target = os.pipe()
    fcntl.fcntl(target, fcntl.F_SETPIPE_SZ, 4096)
    writers = {number: os.pipe() for number in range(4)}
    prefixes = {read: b"[%d] " % number for number, (read, _) in writers.items()}
    writing = threading.Lock()
    halves = [dict([*prefixes.items()][half::2]) for half in range(2)]
    pumps = [Pump(half, target, writing) for half in halves]

    # The second piece begins and ends within a line.
    pieces = [
        piece.encode()
        for count in range(500)
        for piece in (f"{count}:", "x" * 500 + f"\n{count}", "\n")
    ] + [b"the end"]

    def write(pipe):
        for piece in pieces:
            os.write(pipe, piece)
        os.close(pipe)

    threads = [threading.Thread(target=write, args=(w,)) for _, w in writers.values()]

    def close_when_done():
        for thread in threads:
            thread.join()
        for pump in pumps:
            pump.finish()
        os.close(target)

    closer = threading.Thread(target=close_when_done)
    for thread in (*pumps, *threads, closer):
        thread.start()
    with open(shown, "rb") as file:
        lines = file.read().decode().splitlines()
    closer.join()
    for number in writers:
        mine = [line[4:] for line in lines if line.startswith(f"[{number}] ")]
        assert "\n".join(mine) == b"".join(pieces).decode()
    assert len(lines) == 4 * 1001


def test_finishing_does_not_wait_for_a_pipe_that_stays_open(tmp_path):
    read, write = os.pipe()
    with open(tmp_path / "out", "wb") as target:
        pump = Pump({read: b"> "}, target.fileno(), threading.Lock())
        pump.start()
        os.write(write, b"whole\npart")
        pump.finish()
    os.close(write)
    assert (tmp_path / "out").read_bytes() == b"> whole\n> part\n"


@pytest.mark.multiprocess
def test_output_goes_to_the_stream_it_was_written_to(launch):
    status, out, err = launch(
        "print('out', i); sys.stdout.write('no newline'); print(i, file=sys.stderr)"
    )
    assert status == 0
    assert sorted(out.splitlines()) == [
        "[0] no newline", "[0] out 0", "[1] no newline", "[1] out 1",
    ]  # fmt: skip
    assert sorted(err.splitlines()) == ["[0] 0", "[1] 1"]
    status, out, err = launch("os.write(1, b'as is')", processes=1, prefix=False)
    assert (status, out, err) == (0, "as is", "")


@pytest.mark.multiprocess
def test_what_a_process_writes_appears_while_it_runs_and_only_process_0_reads(
    started, program
):
    launcher = started(
        *("-n", "2"),
        program(
            "if i == 1: print(repr(sys.stdin.read())); tell('read'); sys.exit()\n"
            "hear('read'); print('here'); print(sys.stdin.readline())"
        ),
    )
    seen = [launcher.stdout.readline() for _ in range(2)]
    assert sorted(seen) == ["[0] here\n", "[1] ''\n"]
    out, _ = waiting.ended(launcher, "typed")
    assert out == "[0] typed\n"


@pytest.mark.multiprocess
@pytest.mark.parametrize("where", ["/dev/full", "-"])
def test_what_cannot_be_written_ends_in_no_traceback(where, program):
    words = ["-m", "jaxcomm.launch", "-n", "2", program("print('x' * 9)")]
    redirected = f">{where}" if where != "-" else ">&-"
    found = subprocess.run(
        ["sh", "-c", f'exec "$0" "$@" {redirected}', sys.executable, *words],
        capture_output=True, text=True, timeout=waiting.HANG_SECONDS,
    )  # fmt: skip
    # Of the launcher's; the processes may have one of a broken pipe.
    assert "Exception in thread" not in found.stderr
    assert "jaxcomm/launch" not in found.stderr
    told = "jaxcomm.launch: output cannot be written: No space left on device\n"
    assert (told in found.stderr) == (where == "/dev/full")


@pytest.mark.multiprocess
def test_a_program_that_clears_the_environment_fails_as_itself(launch):
    status, _, err = launch("os.environ.clear()\nraise SystemExit(7)")
    assert status == 7
    assert "KeyError" not in err
