"""F2: failures cross processes through the store of jax.distributed."""

import os
import subprocess
import sys
import threading

import forked
import pytest
import waiting

import jaxcomm
from jaxcomm import _ffi, compat
from jaxcomm.communicator import failures
from jaxcomm.launch import port

pytestmark = pytest.mark.multiprocess


class World:
    """What a process has of a world: its first failure, and what it heard."""

    def __init__(self):
        self.own = ""
        self.received = []

    def fail_worlds(self, reason):
        self.received.append(reason)
        self.own = self.own or reason


def some_fail(here, name, failing):
    """Returns the failure of this process, and what it heard."""
    world, store = World(), compat.key_value_store()
    watch = failures.FailureWatch(
        store, here.process, lambda: world.own, world.fail_worlds
    )
    watch.watch(name)
    here.meet(f"{name}: all watch")
    if here.process in failing:
        world.own = f"psum of process {here.process}"
        folder = f"jaxcomm/failures/{name}/"
        key = f"{folder}{here.process}"
        waiting.until(lambda: key in dict(store.key_value_dir_get(folder)))
    else:
        waiting.until(lambda: world.received)
    here.meet(f"{name}: all know")
    watch.stop()
    waiting.until(lambda: not watch.is_running(), "its thread ends")
    return world.own, world.received


def test_all_others_hear_who_failed_and_why(team):
    told = "process 2 failed first: psum of process 2"
    heard = [told, [told]]
    own = ["psum of process 2", []]
    replies = team.call(some_fail, name="one fails", failing=[2])
    assert replies == [heard, heard, own, heard]


def test_two_that_fail_at_once_keep_their_own_texts(team):
    replies = team.call(some_fail, name="two fail", failing=[1, 3])
    for process in (1, 3):
        assert replies[process] == [f"psum of process {process}", []]
    # The others heard of one of them, which was the first to publish that they saw.
    for process in (0, 2):
        own, received = replies[process]
        assert received == [own]
        assert own in {f"process {i} failed first: psum of process {i}" for i in (1, 3)}


def threads():
    return [thread.name for thread in threading.enumerate()]


def made_anew(here):
    """As the backend does it: worlds are named by NCCL and end with finalize()."""
    world = World()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_ffi, "first_failure", lambda: world.own, raising=False)
        patch.setattr(_ffi, "fail_worlds", world.fail_worlds, raising=False)
        for turn in range(2):
            handle = World()  # stands for the communicator of the whole mesh
            failures.watch(f"unique id {turn}", handle)
            here.meet(f"anew {turn}: all watch")
            if here.process == turn:
                world.own = f"failure {turn}"
            waiting.until(lambda: world.own)
            here.meet(f"anew {turn}: all know")
            jaxcomm.finalize()
            waiting.until(lambda: "jaxcomm-failures" not in threads(), "it ends")
            # The extension forgets with its worlds.
            world.own = ""
            here.meet(f"anew {turn}: all forgot")
    return world.received


def test_old_failures_do_not_reach_worlds_made_after_finalize(team):
    for process, received in enumerate(team.call(made_anew)):
        assert received == [
            f"process {turn} failed first: failure {turn}"
            for turn in range(2)
            if turn != process
        ]


COORDINATOR = """
import sys, waiting
from jaxlib import _jax
service = _jax.get_distributed_runtime_service(sys.argv[1], 1)
print("up", flush=True)
waiting.forever()
"""

CUT_OFF = """
import sys, waiting
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
waiting.until(lambda: not watch.is_running(), "the thread ends")
assert received == []
watch.stop()
print("ended", flush=True)
"""


def start(program, address, first_line):
    process = forked.Popen(
        [sys.executable, "-c", program, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"no_grpc_proxy": "127.0.0.1"},
    )
    assert process.stdout.readline() == first_line
    return process


@pytest.mark.parametrize("leaves", [True, False])
def test_the_thread_ends_quietly_when_the_coordinator_has_gone(leaves):
    with port.reserved(0) as number:
        address = f"127.0.0.1:{number}"
        coordinator = start(COORDINATOR, address, "up\n")
    try:
        process = start(CUT_OFF, address, "watching\n")
        if leaves:
            process.stdin.write("leave\n")
            process.stdin.flush()
            assert process.stdout.readline() == "left\n"
    finally:
        coordinator.kill()
        coordinator.communicate()
    output, errors = waiting.ended(process, None if leaves else "\n")
    # XLA ends a process that has not left, and says why.
    if leaves or process.returncode == 0:
        assert (process.returncode, output) == (0, "ended\n"), errors
    else:
        assert "coordination service" in errors
    for ours in ("Traceback", "terminate called", "the thread ends"):
        assert ours not in errors
