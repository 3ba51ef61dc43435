"""How processes meet, and what jaxcomm reports if they do not.

Processes are threads here. The store is a dictionary that counts what it is asked, and
has a clock of its own: see support/job_store.py.
"""

import copy
import threading

import pytest
import waiting
from job_store import meets

from jaxcomm import _ffi, compat, config
from jaxcomm.communicator import hosts, rendezvous
from jaxcomm.communicator import store as product
from jaxcomm.errors import CommunicatorError

MANY = tuple(range(10, 50))


def all_met(met, everyone):
    for process in everyone:
        assert met[process] == {p: 10 * p for p in everyone}, met[process]


def all_meet(store, everyone, purpose="make it"):
    met, messages = store.run(dict.fromkeys(everyone, meets(everyone, purpose)))
    all_met(met, everyone)
    return messages


def all_told(met, *parts):
    for process, error in met.items():
        assert isinstance(error, CommunicatorError), (process, error)
        for part in parts:
            assert part in str(error), process


@pytest.mark.parametrize("size", [2, 9, 64])
def test_a_process_sends_three_messages_and_the_last_one_four(store, size):
    """C8, F7."""
    for _ in range(3):
        messages = all_meet(store, tuple(range(size)))
        assert sorted(messages.values()) == [3] * (size - 1) + [4]
    assert store.now == 0


def test_a_process_does_not_meet_others_without_it(store):
    with pytest.raises(CommunicatorError, match="process 2 has no device in the mesh"):
        meets((0, 1))(2)
    all_meet(store, (0, 1))


def test_processes_that_jax_does_not_know_cannot_meet(monkeypatch):
    monkeypatch.setattr(compat, "key_value_store", lambda: None)
    with pytest.raises(CommunicatorError, match=r"\[0, 1\] cannot find each other"):
        meets((0, 1))(0)


def test_values_that_only_python_takes_for_equal_stay_apart(store):
    given = dict(enumerate([True, 1, 1.0, [0], [False], {"a": 1}, {"a": 1}, None]))
    everyone = tuple(given)
    found, _ = store.run(
        dict.fromkeys(
            everyone, lambda p: rendezvous.exchange(everyone, p, "it", given[p])
        )
    )
    assert set(map(repr, found.values())) == {repr(given)}


def test_each_sees_the_thread_of_those_on_its_host(store, monkeypatch):
    here = threading.local()
    monkeypatch.setattr(hosts, "_boot_id", lambda: here.name)

    def comes(process):
        here.name = "one" if process < 2 else "two"
        hosts.publish((0, 1, 2), process)
        meets((0, 1, 2))(process)
        return hosts.peers((0, 1, 2), process)

    found, _ = store.run(dict.fromkeys((0, 1, 2), comes))
    assert {process: [peer[2] for peer in found[process]] for process in found} == {
        0: [1], 1: [0], 2: [],
    }  # fmt: skip
    (peer,) = found[0]
    assert peer[1] == _ffi.process_start_time(peer[0])


# who is late


@pytest.mark.parametrize(
    ("absent", "named"),
    [
        ([10], "process 10"),
        ([20, 49], "processes 20, 49"),
        (MANY[2:36], f"processes {str(MANY[2:34])[1:-1]} and 2 others"),
    ],
    ids=["the first", "two", "more than are named"],
)
def test_those_that_did_not_come_are_named_and_may_come_later(store, absent, named):
    there = [p for p in MANY if p not in absent]
    met, messages = store.run(dict.fromkeys(there, meets(MANY)))
    all_told(met, f" waited 60 s for {named} of [10, 11, 12, ..., 49] (40 processes)")
    assert all([*error.processes] == [*absent] for error in met.values())
    assert 60 <= store.now < 61
    # In each second a process waits, and one of all looks.
    assert sum(messages.values()) < len(there) * (60 + 8) + 3 * 60
    all_meet(store, MANY)


def test_all_that_came_raise_when_the_first_of_them_times_out(store, monkeypatch):
    here = threading.local()
    monkeypatch.setattr(config, "timeout_seconds", lambda: here.seconds)

    def comes(process):
        here.seconds = 60 if process == 12 else 1000
        return meets(MANY)(process)

    met, _ = store.run(dict.fromkeys(MANY[:-1], comes))
    all_told(met, "process 12 waited 60 s for process 49 of")
    assert store.now < 61


@pytest.mark.parametrize("turn", [0, 1], ids=["the first round", "the last"])
def test_a_process_that_is_interrupted_when_an_outcome_is_there_is_met_again(
    store, turn
):
    wait = store.blocking_key_value_get
    interrupted = threading.Event()

    def is_interrupted(key, milliseconds):
        found = wait(key, milliseconds)
        if key.endswith(f"/{turn}/outcome") and not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt
        return found

    def agrees(process):
        return rendezvous.agree(
            MANY, process, "agree", lambda collect: (collect(1), collect(2), collect(3))
        )

    def comes(process):
        try:
            return agrees(process)
        except KeyboardInterrupt:
            return agrees(process)

    store.blocking_key_value_get = is_interrupted
    met, _ = store.run(dict.fromkeys(MANY, comes))
    assert interrupted.is_set()
    right = tuple(dict.fromkeys(MANY, value) for value in (1, 2, 3))
    assert all(met[process] == right for process in MANY), met


def test_a_process_that_was_started_anew_raises(store, monkeypatch):
    """Its rounds of before are over: their values are not those of now."""
    all_meet(store, (0, 1))
    # Another client of the same entries has met nobody.
    copy.copy(store).serve(monkeypatch)
    for _ in range(2):
        met, _ = store.run({1: meets((0, 1))})
        all_told(met, "process 1 met processes [0, 1] before: it was started anew")


# who wants something else


@pytest.mark.parametrize("absent", [[], [10]], ids=["all come", "the first is late"])
def test_another_purpose_is_reported_to_all_soon(store, absent):
    functions = dict.fromkeys(MANY, meets(MANY, "make A"))
    functions[30] = meets(MANY, "make B")
    met, _ = store.run({p: each for p, each in functions.items() if p not in absent})
    # Before all have come, one of all looks in each second, on average.
    assert store.now < 30
    assert absent or store.now == 0
    some = "processes [10, 11, 12, ..., 49] (40 processes) are out of step: process "
    text = f"{11 if absent else 10} is to make A; process 30 is to make B. Every "
    all_told(met, some + text, "call jaxcomm.init with the same arguments")
    # A process that comes later raises, too.
    met, _ = store.run(dict.fromkeys(absent, meets(MANY, "make A")))
    all_told(met, some + text)
    # They go on together.
    all_meet(store, MANY)


@pytest.mark.parametrize(
    ("one", "other", "late"),
    [
        ((0, 1), (0, 1, 2), 2),
        ((0, 1), (0, 1, 2), None),
        (MANY, (20, 30, 60), None),
        (MANY, (5, 30, 40), None),
    ],
    ids=["two", "three", "many", "the first of both are in one"],
)
def test_processes_that_wait_for_each_other_in_different_sets_raise(
    store, one, other, late
):
    """Each makes first what the other makes after it."""
    there = dict.fromkeys(set(other) - {0, 20, 40, late}, meets(other, "make B"))
    met, _ = store.run(dict.fromkeys(one, meets(one, "make A")) | there)
    all_told(met, " is to make A", " is to make B", "are out of step: process ")
    assert store.now < 30
    if late is not None:
        met, _ = store.run({late: meets(other, "make B")})
        all_told(met, "process 0 is to make A; process 1 is to make B")
    # Nothing of it is left. Processes that raised it in one set go on in the other.
    all_meet(store, one, "make A")
    all_meet(store, other, "make B")
    assert not store.key_value_dir_get("jaxcomm/waiting")


def test_a_round_that_is_over_is_no_reason_to_wait(store):
    """A process that was killed in it has left word that it waits there."""
    all_meet(store, (0, 1, 2), "make B")
    path = next(key for key in store.all_keys() if key.endswith("/outcome"))
    job, path = product.of_job((0, 1)), path.removesuffix("/outcome")
    job.set(f"{path.rpartition('/')[0]}/processes", [0, 1, 2], 1)
    job.set("jaxcomm/waiting/1", [path, "make B"], 1)

    def later(process):
        store.sleep(30)
        return meets((0, 1), "make A")(process)

    met, _ = store.run({0: meets((0, 1), "make A"), 1: later})
    all_met(met, (0, 1))


# who runs something else


@pytest.fixture
def version(monkeypatch):
    """Lets each process say which version it runs, ``version.own``; or our own."""
    here, found = threading.local(), product.own_version()
    monkeypatch.setattr(
        product, "own_version", lambda: getattr(here, "own", None) or found
    )
    return here


@pytest.mark.parametrize(("size", "other"), [(2, 1), (40, 0), (40, 35)])
def test_another_version_is_named_in_all_processes(store, version, size, other):
    everyone = tuple(range(size))

    def comes(process):
        version.own = "9.9/7/0000abcd" if process == other else None
        return meets(everyone)(process)

    met, messages = store.run(dict.fromkeys(everyone, comes))
    all_told(met, "jaxcomm 9.9/7/0000abcd", f"jaxcomm {product.own_version()}")
    all_told(met, "Install the same version in all processes")
    for process, error in met.items():
        assert f"process {other}" in str(error) or process == other
    assert store.now == 0
    assert max(messages.values()) <= 8
    # They go on together.
    all_meet(store, everyone)


@pytest.mark.parametrize("for_good", [False, True])
def test_others_hear_whether_a_process_that_is_to_leave_will_come_again(
    store, for_good
):
    everyone = (0, 1)

    def leave(process):
        with pytest.raises(CommunicatorError, match="for the others of"):
            meets(everyone)(process)
        return None if for_good else meets(everyone)(process)

    def have_it_leave(process):
        def come():
            return {member._me: member for member in rendezvous._meeting}

        waiting.until(lambda: 0 in come())
        come()[0].end("it ends", for_good)
        return meets(everyone)(process)

    found, _ = store.run({0: leave, 1: have_it_leave})
    assert store.now == 0
    if for_good:
        assert str(found[1]) == "process 0 does not come to make it: it ends"
    else:
        assert found == {each: {0: 0, 1: 10} for each in everyone}
