"""Signals to the launcher, as a user starts it."""

import glob
import os
import shlex
import signal
import subprocess
import sys

import pytest
import waiting

from jaxcomm.launch import job

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
    number, status, waits, assert_gone
):
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
    assert "stopping the others" not in err
    assert "restart" not in err
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


def test_three_at_once_end_what_ignores_the_others(waits, assert_gone):
    launcher, found = waits(handled("signal.SIG_IGN"), "--grace=1000")
    # Of two of a kind that nobody has taken yet, the system makes one.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        launcher.send_signal(number)
    waiting.ended(launcher)
    # The status is that of the first; which that is, the system decides.
    assert launcher.returncode - 128 in (2, 3, 15)
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


# Each waits for the other in a lane of its own, which nobody else can know is a hang.
HANGS = """
import threading
import jax, jaxcomm, numpy as np
mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.make_array_from_callback(
    (2,), jax.NamedSharding(mesh, jax.P("i")), lambda index: np.ones(1, np.float32)
)
programs = [
    jax.jit(jax.shard_map(lambda x, lane=lane: jaxcomm.psum(x, "i", lane=lane) + x,
                          mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i")))
    for lane in "ab"
]
for program in programs: jax.block_until_ready(program(x))

def tell_how_far_it_is():
    until(lambda: any(c.stats()["in_flight"] for c in jaxcomm.communicators()))
    tell(f"{i} waits")
    hear(f"{1 - i} waits")
    if i == 0: os.kill(os.getppid(), signal.SIGINT)

shown, (read, write) = os.dup(2), os.pipe()
os.dup2(write, 2)

def tell_of_the_line_that_names_the_record():
    for line in os.fdopen(read, "rb"):
        os.write(shown, line)
        if b"compare all with " in line: tell(f"{i} has told")

for told in tell_how_far_it_is, tell_of_the_line_that_names_the_record:
    threading.Thread(target=told, daemon=True).start()
jax.block_until_ready(programs[i](x))
"""


def test_of_one_that_hangs_the_records_are_compared(
    launch, monkeypatch, time_passes_at
):
    monkeypatch.setattr(job, "_LAST_WORDS_SECONDS", 500)
    # After SIGINT, after the request for records, after SIGTERM.
    time_passes_at("0 waits", "1 waits")
    time_passes_at("0 has told", "1 has told")
    time_passes_at("0 has told", "1 has told")
    status, _, err = launch(HANGS, grace=1000)
    assert status == 130
    assert "flight records of 2 of 2 processes" in err
    assert "rank 0 (process 0, cpu:0) last completed psum(float32[1]) #1" in err
    assert "axes ('i',), lane 'b'" in err
    # What the processes said to do can be done.
    (said,) = {
        line.partition("compare all with ")[2]
        for line in err.splitlines()
        if "compare all with " in line
    }
    python, *arguments = shlex.split(said)
    assert python == "python"
    folder = os.path.dirname(arguments.pop())
    files = glob.glob(f"{folder}/flight-record-*.json")
    done = subprocess.run(
        [sys.executable, *arguments, *files],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout in err
