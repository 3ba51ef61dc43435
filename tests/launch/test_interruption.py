"""Signals to the launcher, as a user starts it."""

import json
import os
import signal

import pytest
import waiting

from jaxcomm.launch import records

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def waits(started, program):
    """Gives ``waits(text, *words)``: a launcher of two that wait, and their ids.

    The text, if any, is what they do before.
    """

    def start(text="", *words, end="forever()"):
        ready = "print(f'pid={os.getpid()}', flush=True)"
        launcher = started("-n2", *words, program(f"{text}\n{ready}\n{end}"))
        pids = [launcher.stdout.readline().split("pid=")[1].strip() for _ in range(2)]
        return launcher, pids

    return start


def handled(what):
    return f"for n in signal.SIGINT, signal.SIGTERM: signal.signal(n, {what})"


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGQUIT, 131)],
)
def test_it_reaches_the_processes_and_nothing_starts_again(
    number, status, waits, assert_gone, tmp_path, monkeypatch
):
    monkeypatch.setenv(records.VARIABLE, str(tmp_path / "records"))
    launcher, found = waits(
        "open(f'/dev/shm/jaxcomm-{os.getpid()}-1', 'w').close()",
        *("--grace=60", "--max-restarts=9"),
    )
    launcher.send_signal(number)
    out, err = waiting.ended(launcher)
    assert (launcher.returncode, out) == (status, "")
    assert_gone(found)
    assert "passed on" in err
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    # They were told to; nothing has failed.
    for word in "stopping the others", "restart", "suspect":
        assert word not in err
    (seen,) = (tmp_path / "records").rglob("flight-record-launcher-*.json")
    assert all(each["was_asked"] for each in json.loads(seen.read_text())["seen"])
    assert not {f"jaxcomm-{pid}-1" for pid in found}.intersection(
        os.listdir("/dev/shm")
    )


def test_a_program_may_end_well_after_an_interruption(waits):
    text = "signal.signal(signal.SIGINT, lambda *_: (print('saved'), sys.exit()))"
    launcher, _ = waits(text, "--grace=60")
    launcher.send_signal(signal.SIGINT)
    out, _ = waiting.ended(launcher)
    assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"]
    assert launcher.returncode == 0


def test_a_second_and_a_third_insist(waits, assert_gone):
    text = handled("lambda got, _: print('got', got, flush=True)")
    launcher, found = waits(text, "--grace=1000")
    for number in (signal.SIGINT, signal.SIGTERM):
        launcher.send_signal(signal.SIGINT)
        got = sorted(launcher.stdout.readline() for _ in range(2))
        assert got == [f"[{i}] got {number:d}\n" for i in range(2)]
    launcher.send_signal(signal.SIGINT)
    _, err = waiting.ended(launcher)
    assert launcher.returncode == 130
    assert "still running, now killed: 0, 1" in err
    assert_gone(found)


def test_a_request_for_records_ends_nothing(waits):
    launcher, _ = waits(
        # Process 1 does not know the signal, which would end it.
        "if i == 0: signal.signal(signal.SIGUSR1, lambda *_: tell('asked'))",
        end="hear('asked')",
    )
    launcher.send_signal(signal.SIGUSR1)
    _, err = waiting.ended(launcher)
    assert (launcher.returncode, err) == (0, "")


def test_the_processes_end_with_a_launcher_that_is_killed(waits, is_running):
    launcher, found = waits()
    launcher.kill()
    launcher.wait(waiting.HANG_SECONDS)
    waiting.until(lambda: not any(map(is_running, found)), "they end")
