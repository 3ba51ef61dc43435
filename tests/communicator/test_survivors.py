"""Which processes go on: processes that are threads agree through a store in memory."""

import threading

import jax
import numpy as np
import pytest
from job_store import JobStore

import jaxcomm
from jaxcomm.communicator import cache, hosts, presence, rendezvous, survivors
from jaxcomm.communicator.store import of_job

FOUR = (0, 1, 2, 3)
TIMEOUT = 60


@pytest.fixture
def ended(monkeypatch):
    """The processes that have ended: a test adds some."""
    some = set()
    monkeypatch.setattr(hosts, "ended", lambda processes, me: some & {*processes})
    monkeypatch.setattr(hosts, "publish", lambda processes, me: None)
    return some


@pytest.fixture
def store(monkeypatch, ended):
    made = JobStore()
    made.serve(monkeypatch)
    monkeypatch.setattr(presence, "time", made)
    return made


def agree(store, *processes):
    """What each of some processes returns or raises, when all come at once."""
    found, _ = store.run(
        dict.fromkeys(processes, lambda p: survivors._agree(FOUR, p, TIMEOUT))
    )
    return found


def all_find(*processes):
    return {process: list(processes) for process in processes}


def test_all_learn_at_once_who_has_ended(store, ended):
    ended.add(2)
    assert agree(store, 0, 1, 3) == all_find(0, 1, 3)
    assert store.now < TIMEOUT


@pytest.fixture
def interrupted(store, monkeypatch):
    """Process 0 has come, and was interrupted while it waited for the others."""
    with monkeypatch.context() as patch:
        patch.setattr(presence.Store, "wait", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            survivors._agree(FOUR, 0, TIMEOUT)


def _interrupt(*arguments):
    raise KeyboardInterrupt


def test_a_process_that_came_and_ended_is_lost(store, ended, interrupted):
    ended.add(0)
    assert agree(store, 1, 2, 3) == all_find(1, 2, 3)


def test_a_process_that_was_interrupted_comes_to_the_same_round(store, interrupted):
    assert agree(store, *FOUR) == all_find(*FOUR)


def test_a_late_process_is_given_up_and_learns_that(store):
    assert agree(store, 0, 1, 3) == all_find(0, 1, 3)
    assert store.now >= TIMEOUT
    (late,) = agree(store, 2).values()
    assert isinstance(late, jaxcomm.CommunicatorError)
    assert str(late) == (
        "process 2 came too late: the others of [0, 1, 2, 3] had waited for it, and "
        "gave it up. [0, 1, 3] go on without it. End this process"
    )


def test_a_process_that_was_given_up_before_and_comes_is_lost(store, monkeypatch):
    """The launcher's question can wake it: it comes, and is ended then."""
    monkeypatch.setattr(presence, "_tell_launcher", lambda process: None)
    presence.end(of_job(FOUR), [2], me=0)
    found = agree(store, *FOUR)
    assert "process 2 came too late" in str(found.pop(2))
    assert found == all_find(0, 1, 3)
    assert store.now < TIMEOUT


def test_if_all_come_nobody_is_lost_and_a_later_loss_is_seen(store, ended):
    for _ in range(2):
        assert agree(store, *FOUR) == all_find(*FOUR)
    assert store.now < TIMEOUT
    ended.add(0)
    assert agree(store, 1, 2, 3) == all_find(1, 2, 3)
    # Also where the same are asked for again.
    ended.add(1)
    assert agree(store, 2, 3) == all_find(2, 3)


def test_who_makes_communicators_with_a_process_that_agrees_is_told(store, ended):
    """It would wait for the other, and the other for it."""
    ended.add(2)

    def make_then_agree(process):
        with pytest.raises(rendezvous.LateError) as told:
            rendezvous.meet((0, 1), process, "make it", 0)
        return str(told.value), survivors._agree((0, 1, 2), process, TIMEOUT)

    found, _ = store.run(
        {0: make_then_agree, 1: lambda p: survivors._agree((0, 1, 2), p, TIMEOUT)}
    )
    text = (
        "process 1 is to agree who is left (jaxcomm.shrink), with processes [0, 1, 2], "
        "and does not come to make it"
    )
    assert found == {0: (text, [0, 1]), 1: [0, 1]}
    assert store.now < TIMEOUT


def test_who_is_late_to_make_communicators_is_given_up_and_told(
    store, ended, monkeypatch
):
    ended.add(3)
    here = threading.local()

    def those_left(processes, *_):
        found = tuple(survivors._agree(processes, here.process, TIMEOUT))
        return processes if found == processes else found

    def make(_, processes):
        if here.process == 2:
            store.hear("the others go on")
        rendezvous.meet(processes, here.process, "make it", 0)

    # Processes are in the place of meshes.
    monkeypatch.setattr(survivors, "_survivors", those_left)
    monkeypatch.setattr(survivors, "processes_of", tuple)
    monkeypatch.setattr(cache, "move", make)
    monkeypatch.setattr(jax, "process_index", lambda: here.process)

    def shrink(process):
        here.process = process
        found = jaxcomm.shrink(FOUR, "i")
        store.tell("the others go on")
        return found

    found, _ = store.run(dict.fromkeys((0, 1, 2), shrink))
    assert found[0] == found[1] == (0, 1)
    assert "process 2 came too late" in str(found[2])


def test_a_mesh_of_one_process_is_whole():
    mesh = jax.make_mesh((2, 4), ("data", "context"))
    assert jaxcomm.mesh_of_survivors(mesh, "data") is mesh


def test_shrink_keeps_what_lost_nobody(make_mesh, psum_over):
    """Also programs compiled before."""
    mesh = make_mesh(i=8)
    (member,) = jaxcomm.init(mesh)
    x = np.arange(8, dtype=np.float32)
    program = psum_over(mesh, "i").lower(x).compile()
    assert jaxcomm.shrink(mesh, "i") is mesh
    assert not member.closed
    assert set(np.asarray(program(x))) == {28}


def test_check_returns_results_and_raises_what_computing_them_raised():
    tree = {"loss": jax.numpy.ones(2)}
    assert jaxcomm.raise_if_failed(tree) is tree
    with pytest.raises(TypeError, match=r"^raise_if_failed: a result is being traced"):
        jax.jit(jaxcomm.raise_if_failed)(np.ones(2))


def test_a_process_without_devices_in_the_mesh_decides_nothing(store, monkeypatch):
    monkeypatch.setattr(survivors, "processes_of", lambda mesh: FOUR)
    monkeypatch.setattr(jax, "process_index", lambda: 4)
    with pytest.raises(jaxcomm.CommunicatorError) as told:
        jaxcomm.mesh_of_survivors(jax.make_mesh((8,), ("i",)), "i", timeout=TIMEOUT)
    assert "process 4 has no device in the mesh, whose processes are" in str(told.value)
    assert agree(store, *FOUR) == all_find(*FOUR)


@pytest.mark.parametrize("function", [jaxcomm.mesh_of_survivors, jaxcomm.shrink])
def test_what_is_no_mesh_or_no_axis_is_refused_by_name(function):
    name = function.__name__
    with pytest.raises(TypeError, match=f"^{name}: mesh must be a jax.sharding.Mesh"):
        function("mesh", "data")
    with pytest.raises(ValueError, match=f"^{name}: 'data' is no axis of"):
        function(jax.make_mesh((1,), ("i",)), "data")
