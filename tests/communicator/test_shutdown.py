"""A process ends when nobody needs it any more, or soon."""

import itertools
import sys
import types

import forked
import pytest
import waiting

from jaxcomm.communicator import shutdown

# So many looks in a row must find nothing: between two collectives it is quiet, too.
QUIET_LOOKS = 10


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A clock that only waits move: a loaded machine takes no time from a test."""
    made = waiting.Clock()
    monkeypatch.setattr(shutdown, "time", made)
    return made


def member(neighbors=(), looks=(), ends=True):
    """Stands for a communicator with so many calls in flight, look by look.

    If -1, none, but one has come and gone since the last look. Unless it ``ends`` none,
    each look sees others than the one before.
    """
    looks = iter(looks)
    made = types.SimpleNamespace(neighbors=neighbors, looked=0)
    calls = {"all_reduce": 0}

    def stats():
        made.looked += 1
        in_flight = next(looks, 0)
        calls["all_reduce"] += ends and abs(in_flight)
        return {"calls": dict(calls), "in_flight": max(in_flight, 0)}

    made.stats = stats
    return made


def test_it_waits_for_collectives_also_between_two_of_them():
    looks = [1, 0, 1, 0, 0, 2, 0, 0, -1]
    found = member(looks=looks)
    assert shutdown.wait_for_work([member(), found], 30)
    assert found.looked == len(looks) + QUIET_LOOKS


def test_it_waits_longer_for_what_goes_on_but_not_for_ever(clock):
    hangs = member(looks=itertools.repeat(1), ends=False)
    assert not shutdown.wait_for_work([hangs], 1.5)
    assert sum(clock.slept) == pytest.approx(1.5, abs=0.02)
    looks = [1] * 3000
    found = member(looks=looks)
    assert shutdown.wait_for_work([found], 1)
    assert found.looked == len(looks) + QUIET_LOOKS
    assert sum(clock.slept) > 10
    begin = clock.now
    assert not shutdown.wait_for_work([member(looks=itertools.repeat(1))], 100)
    assert clock.now - begin == pytest.approx(30, abs=0.02)


def test_it_waits_for_arrays_that_are_not_computed_and_for_no_deleted_one(monkeypatch):
    def deleted():
        raise RuntimeError("Array has been deleted")

    looks = iter([False, True, False])
    arrays = [
        types.SimpleNamespace(is_ready=deleted),
        types.SimpleNamespace(is_ready=lambda: next(looks, True)),
    ]
    monkeypatch.setattr(shutdown.jax, "live_arrays", lambda platform: arrays)
    found = member()
    assert shutdown.wait_for_work([found], 30)
    assert found.looked == 3 + QUIET_LOOKS


def test_it_waits_longer_for_a_program_that_computes_and_waits_for_nobody(
    monkeypatch, clock
):
    looks = iter([False] * 2000)
    array = types.SimpleNamespace(is_ready=lambda: next(looks, True))
    monkeypatch.setattr(shutdown.jax, "live_arrays", lambda platform: [array])
    # Then it comes to a collective in which it waits.
    found = member(looks=[0] * 1000 + [1] * 10)
    assert shutdown.wait_for_work([found], 1)
    assert sum(clock.slept) > 9
    looks = iter([False] * 100_000)
    assert not shutdown.wait_for_work([member(looks=[1] * 100_000, ends=False)], 1.5)
    assert not shutdown.wait_for_work([member()], 1.5)
    assert sum(clock.slept) < 9 + 1.5 + 31 + 2


@pytest.mark.parametrize("why", ["it stays in the process", "an exception"])
def test_there_are_reasons_to_wait_for_nobody(monkeypatch, why):
    if is_error := why == "an exception":
        monkeypatch.setattr(sys, "last_value", KeyError("mine"), raising=False)
    found = member(() if is_error else None, looks=itertools.repeat(1))
    assert shutdown.wait_for_work([found], 30) == (not is_error)
    assert found.looked == 0


# How many communicators a process has before its end, and after.
OF_A_FORK_SERVER = """
import multiprocessing, multiprocessing.util

def work():
    import jax
    import jaxcomm
    tell = lambda: print(len(jaxcomm.communicators()), flush=True)
    multiprocessing.util.Finalize(None, tell, exitpriority=-1)
    jaxcomm.init(jax.make_mesh((2,), ("i",), devices=jax.devices()[:2]))
    tell()

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    for loads in (["jaxcomm"], []):
        context.set_forkserver_preload(loads)
        child = context.Process(target=work)
        child.start()
        child.join()
        multiprocessing.forkserver._forkserver._stop()
"""


def test_what_a_fork_server_starts_ends_its_communicators(tmp_path):
    """Whether or not the server has loaded jaxcomm."""
    program = tmp_path / "program.py"
    program.write_text(OF_A_FORK_SERVER)
    done = forked.run(
        [sys.executable, program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["1", "0", "1", "0"], done.stderr
