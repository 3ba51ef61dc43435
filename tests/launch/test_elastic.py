"""Jobs that go on while enough of their processes live."""

import contextlib
import os

import pytest

from jaxcomm.launch import members

pytestmark = pytest.mark.multiprocess

# Each process comes once all have, or have ended.
PROGRAM = """
import jax
count = jax.process_count()
tell(f"pid-{i}", str(os.getpid()))
pids = [int(hear(f"pid-{k}")) for k in range(count)]
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
STOPPED = "os.kill(os.getpid(), signal.SIGSTOP)"


def test_any_process_may_end_the_first_too(launch, notes):
    status, out, err = launch(
        f"""{PROGRAM}
if i == 0: {KILLED}
until(lambda: not is_running(pids[0]))
if i == 1: raise ValueError("mine")
until(lambda: not is_running(pids[1]))
print("process", i, "of", count, "goes on")
""",
        processes=3,
        elastic=True,
    )
    assert status == 0, err
    assert "process 2 of 3 goes on" in out
    # The launcher may see the second end first.
    assert "process 0 was ended by SIGKILL; " in err
    assert "process 1 ended with status 1; " in err
    assert err.count("go on") == err.count("goes on") == 1


def test_a_job_of_fewer_than_it_needs_ends_and_may_start_again(launch, notes):
    status, out, err = launch(
        f"""{PROGRAM.replace("pid-", "pid-{os.environ['JAXCOMM_RESTART_COUNT']}-")}
if os.environ["JAXCOMM_RESTART_COUNT"] == "0":
    if i > 0: {KILLED}
    forever()
print("process", i, "is done")
""",
        processes=2,
        elastic=True,
        min_processes=2,
        max_restarts=1,
    )
    assert status == 0, err
    assert out.count("is done") == 2
    assert "was ended by SIGKILL; stopping the others" in err
    assert "done after 1 restart" in err


@pytest.mark.parametrize("cause", [KILLED, STOPPED])
def test_if_a_process_is_lost_before_all_have_joined_the_others_join_without_it(
    cause, launch, notes, monkeypatch
):
    monkeypatch.setattr(members, "_STOPPED_SECONDS", 0)
    status, out, err = launch(
        f"""
if i == 1 and not os.path.exists(note("died")):
    tell("died")
    {cause}
{PROGRAM}
print("process", i, "of", count, "is done")
""",
        processes=3,
        elastic=True,
    )
    assert status == 0, err
    assert out.count("of 2 is done") == 2
    assert "process 1 was ended by SIGKILL before all had joined: starting again" in err


@pytest.mark.parametrize("cause", [KILLED, "raise ValueError('mine')"])
def test_too_few_that_join_are_a_failure(cause, launch):
    status, _, err = launch(
        f"if i > 0: {cause}\nimport jax\njax.devices()",
        processes=2,
        elastic=True,
        min_processes=2,
    )
    assert status == (137 if cause == KILLED else 1)
    assert "starting again" not in err


@pytest.mark.parametrize("ending", ["", "raise ValueError('mine')"])
def test_one_that_is_stopped_as_the_others_end_does_not_hold_up_the_job(
    ending, launch, notes, monkeypatch, assert_gone
):
    """Nobody else misses it."""
    monkeypatch.setattr(members, "_STOPPED_SECONDS", 0)
    status, out, err = launch(
        f"""{PROGRAM}
if i == 1: {STOPPED}
print("process", i, "is done")
{ending}
""",
        processes=2,
        elastic=True,
        grace=0.5,
    )
    assert "process 0 is done" in out
    # Of the one that ends the job: nobody is left then.
    assert status == (137 if ending else 0), err
    assert "process 1 was stopped, and given up" in err
    assert_gone([(notes / "pid-1").read_text()])


def test_a_process_that_failed_and_stays_ends_once_given_up_or_with_the_job(
    launch, notes
):
    status, out, err = launch(
        f"""{PROGRAM}
import atexit
from jaxcomm.communicator import presence
def stay():
    tell(f"failed-{{i}}")  # the launcher knows it by now
    forever()
if i > 0:
    atexit.register(stay)
    raise ValueError("mine")
hear("failed-1"), hear("failed-2")
presence.give_up([1])
until(lambda: not is_running(pids[1]), "the end of process 1")
print("process", i, "is done,", is_running(pids[2]))
""",
        processes=3,
        elastic=True,
        grace=0.5,
    )
    assert status == 0, err
    assert "process 0 is done, True" in out
    for i in 1, 2:
        assert f"process {i} ended with status 1; " in err


def test_who_was_given_up_is_killed_and_the_job_does_not_wait_for_it(
    launch, notes, assert_gone
):
    """Process 1 is stopped. It would go on some day, and write a checkpoint.

    Of process 2 nobody sees the end, since a tracer keeps it: that stands for a process
    that waits for a device, and for the kernel, which does not end it before.
    """
    status, out, err = launch(
        f"""{PROGRAM}
import ctypes
import jaxcomm
from waiting import EXPIRES_SECONDS
PTRACE_SEIZE = 0x4206
mesh = jax.make_mesh((3,), ("i",), (jax.sharding.AxisType.Auto,))
if i == 1: os.kill(os.getpid(), signal.SIGSTOP)
if i == 2:
    if os.fork() == 0:
        os.setsid()
        seized = ctypes.CDLL(None).ptrace(PTRACE_SEIZE, os.getppid(), 0, 0)
        tell("traced", str(seized == 0))
        hear("release")
        os._exit(0)
    forever()
print("traces", hear("traced"))
smaller = jaxcomm.shrink(mesh, "i", timeout=EXPIRES_SECONDS)
# While the job goes on, not at its end.
until(lambda: not is_running(pids[1]), "the end of process 1")
print("process", i, "goes on with", smaller.size)
""",
        processes=3,
        elastic=True,
        grace=0.5,
        timeout=60.0,
    )
    (notes / "release").touch()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(int((notes / "pid-2").read_text()), 0)
    assert "process 0 goes on with 1" in out
    assert status == 0, err
    assert_gone([(notes / f"pid-{i}").read_text() for i in (1, 2)])
    for i in 1, 2:
        assert f"process {i} was given up by the others; " in err
    if "traces True" in out:
        # A tracer has to let it go: a zombie.
        text = "process 2 is killed, and the kernel does not end it: left behind in"
        assert f"{text} state Z, with its GPUs if any" in err
