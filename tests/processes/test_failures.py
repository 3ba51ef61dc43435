"""F2: failures cross processes through the store of jax.distributed."""

import os
import subprocess
import sys
import threading
import time

import forked
import jax
import pytest

import jaxcomm
from jaxcomm import _ffi, compat
from jaxcomm.communicator import failures
from jaxcomm.launch import port

pytestmark = pytest.mark.multiprocess

# F2 allows five seconds; the rest is for a loaded machine.
SECONDS = 60


class World:
    """What a process has of a world: its first failure, and what it heard."""

    def __init__(self):
        self.own = ""
        self.received = []

    def fail_worlds(self, reason):
        self.received.append(reason)
        self.own = self.own or reason

    def watch(self, name):
        watch = failures.FailureWatch(
            compat.key_value_store(),
            jax.process_index(),
            lambda: self.own,
            self.fail_worlds,
        )
        watch.watch(name)
        return watch


def until(condition, what, seconds=SECONDS):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def published(name):
    """Returns which processes published a failure of a world."""
    found = compat.key_value_store().key_value_dir_get(f"jaxcomm/failures/{name}/")
    return sorted(int(key.rpartition("/")[2]) for key, _ in found)


def one_fails(here):
    world = World()
    watch = world.watch("one fails")
    here.meet("one fails: all watch")
    begin = time.monotonic()
    if here.process == 2:
        world.own = "psum(float32[4]): rank 3 is gone"
        until(lambda: published("one fails") == [2], "it did not publish")
    else:
        until(lambda: world.received, "it did not hear")
    here.meet("one fails: all know")
    watch.stop()
    assert not watch.is_running()
    return world.received, time.monotonic() - begin


def test_all_others_hear_who_failed_and_why(team):
    told = ["process 2 failed first: psum(float32[4]): rank 3 is gone"]
    replies = team.call(one_fails)
    assert [received for received, _ in replies] == [told, told, [], told]


def two_fail(here):
    world = World()
    watch = world.watch("two fail")
    here.meet("two fail: all watch")
    if here.process in (1, 3):
        world.own = f"of process {here.process}"
        until(lambda: here.process in published("two fail"), "it did not publish")
    else:
        until(lambda: world.received, "it did not hear")
    here.meet("two fail: all know")
    watch.stop()
    return world.own, world.received


def test_two_that_fail_at_once_keep_their_own_texts(team):
    replies = team.call(two_fail)
    assert [replies[process] for process in (1, 3)] == [
        ["of process 1", []],
        ["of process 3", []],
    ]
    # The others heard of one of them, which was the first to publish that they saw.
    for process in (0, 2):
        own, received = replies[process]
        assert received == [own]
        assert own in {f"process {i} failed first: of process {i}" for i in (1, 3)}


def made_anew(here):
    """As the backend does it: worlds are named by NCCL and end with finalize()."""
    world = World()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_ffi, "first_failure", lambda: world.own, raising=False)
        patch.setattr(_ffi, "fail_worlds", world.fail_worlds, raising=False)
        for turn in range(3):
            handle = World()  # stands for the communicator of the whole mesh
            failures.watch(f"unique id {turn}", handle)
            here.meet(f"anew {turn}: all watch")
            if here.process == turn:
                world.own = f"failure {turn}"
            until(lambda: world.own, "it did not hear")
            here.meet(f"anew {turn}: all know")
            jaxcomm.finalize()
            threads = [thread.name for thread in threading.enumerate()]
            assert "jaxcomm-failures" not in threads
            # The extension forgets with its worlds.
            world.own = ""
            here.meet(f"anew {turn}: all forgot")
    return world.received


def test_old_failures_do_not_reach_worlds_made_after_finalize(team):
    received = team.call(made_anew)
    for process in range(4):
        assert received[process] == [
            f"process {turn} failed first: failure {turn}"
            for turn in range(3)
            if turn != process
        ]


COORDINATOR = """
import sys, time
from jaxlib import _jax
service = _jax.get_distributed_runtime_service(sys.argv[1], 1)
print("up", flush=True)
time.sleep(600)
"""

CUT_OFF = """
import sys, time
from jaxlib import _jax
from jaxcomm.communicator import failures
client = _jax.get_distributed_runtime_client(sys.argv[1], 0)
client.connect()
received = []
watch = failures.FailureWatch(client, 0, lambda: "", received.append, interval=0.1,
                              give_up=1.0)
watch.watch("w")
assert watch.is_running()
print("watching", flush=True)
if sys.stdin.readline() == "leave\\n":
    client.shutdown()  # as jax.distributed.shutdown() does
    print("left", flush=True)
deadline = time.monotonic() + 60
while watch.is_running():
    assert time.monotonic() < deadline, "the thread stays"
    time.sleep(0.01)
assert received == []
begin = time.monotonic()
watch.stop()
assert time.monotonic() - begin < 5
print("ended", flush=True)
"""


def start(program, address):
    return forked.Popen(
        [sys.executable, "-c", program, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"no_grpc_proxy": "127.0.0.1"},
    )


@pytest.fixture
def coordinator_and_process():
    with port.reserved(0) as number:
        address = f"127.0.0.1:{number}"
        coordinator = start(COORDINATOR, address)
        assert coordinator.stdout is not None
        assert coordinator.stdout.readline() == "up\n"
    process = start(CUT_OFF, address)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "watching\n"
        yield coordinator, process
    finally:
        for each in (coordinator, process):
            each.kill()
            each.communicate()


def test_the_thread_ends_quietly_after_jax_distributed_shutdown(
    coordinator_and_process,
):
    coordinator, process = coordinator_and_process
    process.stdin.write("leave\n")
    process.stdin.flush()
    assert process.stdout.readline() == "left\n"
    coordinator.kill()
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, output) == (0, "ended\n"), errors
    assert "Traceback" not in errors


def test_the_thread_adds_nothing_where_the_coordinator_is_killed(
    coordinator_and_process,
):
    """XLA ends the process then, and says why."""
    coordinator, process = coordinator_and_process
    coordinator.kill()
    coordinator.wait()
    output, errors = process.communicate("\n", timeout=120)
    if process.returncode == 0:
        assert output == "ended\n"
    else:
        assert "coordination service" in errors
    for ours in ("Traceback", "terminate called", "the thread stays"):
        assert ours not in errors
