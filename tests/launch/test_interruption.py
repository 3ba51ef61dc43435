"""Signals to the launcher, as a user starts it."""

import signal

import pytest

pytestmark = pytest.mark.multiprocess

READY = "print(f'pid={os.getpid()}')\n"


def until_ready(process, count=2):
    """Reads the process ids that the programs print once they can be interrupted."""
    return [process.stdout.readline().split("pid=")[1].strip() for _ in range(count)]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_it_reaches_the_processes(number, status, started, program, assert_gone):
    launcher = started("-n", "2", program(READY + "time.sleep(1000)"))
    found = until_ready(launcher)
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=30)
    assert launcher.returncode == status
    assert_gone(found, seconds=0)
    assert "passed on" in err
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    # They were told to; nothing has failed.
    assert "stopping the others" not in err


def test_a_program_may_end_well_after_an_interruption(started, program):
    launcher = started(
        "-n",
        "2",
        program(
            f"try:\n  {READY}  time.sleep(1000)\n"
            "except KeyboardInterrupt: print('saved')"
        ),
    )
    until_ready(launcher)
    launcher.send_signal(signal.SIGINT)
    out, _ = launcher.communicate(timeout=30)
    assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"]
    assert launcher.returncode == 0


def test_a_second_and_a_third_insist(started, program, assert_gone):
    launcher = started(
        "-n",
        "2",
        "--grace=1000",
        program(
            "for number in (signal.SIGINT, signal.SIGTERM):\n"
            "  signal.signal(number, lambda got, _: print('got', got))\n"
            f"{READY}while True: time.sleep(1000)"
        ),
    )
    found = until_ready(launcher)
    for number in (signal.SIGINT, signal.SIGTERM):
        launcher.send_signal(signal.SIGINT)
        got = sorted(launcher.stdout.readline() for _ in range(2))
        assert got == [f"[{i}] got {number:d}\n" for i in range(2)]
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=30)
    assert launcher.returncode == 130
    assert "still running, now killed: 0, 1" in err
    assert_gone(found, seconds=0)


def test_the_processes_end_with_a_launcher_that_is_killed(
    started, program, assert_gone
):
    launcher = started("-n", "2", program(READY + "time.sleep(1000)"))
    found = until_ready(launcher)
    launcher.kill()
    launcher.wait(timeout=30)
    assert_gone(found)
