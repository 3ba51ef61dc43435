"""F2: failures cross processes through the store of jax.distributed."""

import pytest
import waiting
from team import starting

from jaxcomm import compat
from jaxcomm.communicator import failures

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


def test_the_thread_ends_quietly_when_the_coordinator_has_gone(tmp_path):
    with starting(tmp_path) as start:
        processes = start(2)
        processes[1].ask(
            """
from jaxcomm import compat
from jaxcomm.communicator import failures
received = []
watch = failures.FailureWatch(compat.key_value_store(), 1, lambda: "", received.append,
                              interval=0.1, give_up=1.0)
watch.watch("w")
assert watch.is_running()
"""
        )
        processes.ask("jax.distributed.shutdown()")
        code = "waiting.until(lambda: not watch.is_running()); answer = received"
        assert processes[1].ask(code) == []
        processes.end()
        for text in ("Traceback", "terminate called"):
            assert text not in processes[1].said()
