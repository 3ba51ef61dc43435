"""How processes meet: in how many messages, and what they are told if they do not.

Processes are threads here, and the store is a dictionary that counts what it is asked.
"""

import threading
import time

import pytest
from job_store import meets

from jaxcomm import _ffi
from jaxcomm.communicator import peer_info, rendezvous
from jaxcomm.errors import CommunicatorError

# Of a meeting, beside one for each process: what it writes and reads in any case.
FEW_MESSAGES = 24


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("size", [2, 9, 64])
def test_a_meeting_is_a_few_messages_and_at_most_one_for_each_process(processes, size):
    """C8, F7."""
    everyone = tuple(range(size))
    for _ in range(3):
        met, messages = processes.run(dict.fromkeys(everyone, meets(everyone)))
        for process in everyone:
            assert met[process].values == {p: 10 * p for p in everyone}
        assert max(messages.values()) <= FEW_MESSAGES + size


@pytest.mark.usefixtures("patient")
def test_messages_do_not_grow_with_processes_that_are_there_already(processes):
    for size in (8, 128):
        everyone = tuple(range(1000, 1000 + size))
        late = threading.Event()

        def waits(process, everyone=everyone, late=late):
            assert late.wait(60)
            return meets(everyone)(process)

        def comes_first(process, everyone=everyone, late=late):
            threading.Timer(0.05, late.set).start()
            return meets(everyone)(process)

        functions = dict.fromkeys(everyone, comes_first) | {everyone[-1]: waits}
        _, messages = processes.run(functions)
        # Three are written, one is read: nobody is missing when it comes.
        assert messages[everyone[-1]] <= 4 + FEW_MESSAGES // 2


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("order", ["rising", "falling"])
def test_messages_stay_few_where_processes_come_one_after_the_other(processes, order):
    everyone = tuple(range(32))
    begun = time.monotonic()

    def comes(process):
        turn = process if order == "rising" else len(everyone) - process
        time.sleep(max(0, begun + 0.01 * turn - time.monotonic()))
        return meets(everyone)(process)

    _, messages = processes.run(dict.fromkeys(everyone, comes))
    assert max(messages.values()) <= FEW_MESSAGES + len(everyone)


def test_each_sees_the_thread_of_those_on_its_host(processes, monkeypatch):
    hosts = threading.local()
    monkeypatch.setattr(peer_info, "_boot_id", lambda: hosts.name)

    def comes(process):
        hosts.name = "one" if process < 2 else "two"
        return meets((0, 1, 2))(process)

    met, _ = processes.run(dict.fromkeys((0, 1, 2), comes))
    seen = {process: [peer[2] for peer in met[process].peers()] for process in met}
    assert seen == {0: [1], 1: [0], 2: []}
    (peer,) = met[0].peers()
    assert peer[1] == _ffi.process_start_time(peer[0])


def test_processes_that_come_for_different_things_are_told_at_once(processes):
    everyone = (0, 1, 2)
    functions = dict.fromkeys(
        everyone, meets(everyone, "make a communicator A", number=2)
    )
    functions[1] = meets(everyone, "make a communicator B", number=5)
    met, _ = processes.run(functions)
    for process in everyone:
        assert isinstance(met[process], CommunicatorError), met
        text = str(met[process])
        assert "processes [0, 1, 2] are out of step" in text
        assert "process 1 is to make a communicator B, its number 5" in text
        assert "is to make a communicator A, its number 2" in text
        assert "call jaxcomm.init with the same arguments" in text
    # They go on together.
    met, _ = processes.run(dict.fromkeys(everyone, meets(everyone)))
    assert met[0].values == {0: 0, 1: 10, 2: 20}


def test_the_same_words_for_different_keys_are_different_things(processes):
    functions = {0: meets((0, 1), key=1), 1: meets((0, 1), key=2)}
    met, _ = processes.run(functions)
    assert all("out of step" in str(met[process]) for process in (0, 1))


def test_who_comes_late_to_a_disagreement_is_told_of_it_too(processes):
    everyone = (0, 1, 2)
    first = {0: meets(everyone, "make A"), 1: meets(everyone, "make B")}
    met, _ = processes.run(first)
    assert all("out of step" in str(met[process]) for process in (0, 1))
    met, _ = processes.run({2: meets(everyone, "make A")})
    assert "process 1 is to make B" in str(met[2])


@pytest.mark.parametrize("last", [0, 1], ids=["the one is", "the other is"])
def test_processes_that_wait_for_each_other_in_different_sets_are_told(
    processes, store, last
):
    """Each makes first what the other makes after it; one of them finds out first."""
    functions = {
        0: meets((0, 1), "make A"),
        1: meets((0, 1, 2), "make B"),
        2: meets((0, 1, 2), "make B"),
    }

    def comes(process):
        if process == last:
            store.slow.add(threading.get_ident())
        return functions[process](process)

    met, _ = processes.run(dict.fromkeys((0, 1, 2), comes))
    for process in (0, 1, 2):
        text = str(met[process])
        assert "are out of step: process 0 is to make A; process " in text, met
        assert " is to make B" in text
    # Nothing of it is left.
    store.slow.clear()
    met, _ = processes.run(dict.fromkeys((0, 1, 2), meets((0, 1, 2), "make B")))
    assert met[0].values == {0: 0, 1: 10, 2: 20}, met
    met, _ = processes.run(dict.fromkeys((0, 1), meets((0, 1), "make A")))
    assert met[0].values == {0: 0, 1: 10}


def test_who_comes_when_such_processes_have_given_up_is_told_too(processes, store):
    def comes(process):
        if process == 0:
            store.slow.add(threading.get_ident())
            return meets((0, 1), "make A")(process)
        return meets((0, 1, 2), "make B")(process)

    processes.run({0: comes, 1: comes})
    met, _ = processes.run({2: comes})
    assert "process 0 is to make A; process 1 is to make B" in str(met[2])


def test_a_meeting_that_is_over_is_no_reason_to_wait(processes):
    """What a process was at last may be long done: it computes."""
    processes.run(dict.fromkeys((0, 1, 2), meets((0, 1, 2), "make B")))
    comes = threading.Event()

    def later(process):
        assert comes.wait(60)
        return meets((0, 1), "make A")(process)

    threading.Timer(1.0, comes.set).start()
    met, _ = processes.run({0: meets((0, 1), "make A"), 1: later})
    assert met[0].values == {0: 0, 1: 10}


def test_who_does_not_come_is_named(processes, monkeypatch):
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "3")
    everyone = (0, 1, 2, 3)
    met, messages = processes.run({p: meets(everyone) for p in (0, 3)})
    for process in (0, 3):
        assert "waited 3 s for processes 1, 2 of [0, 1, 2, 3]" in str(met[process])
    # Five waits in a second at most, and after each about six looks.
    assert max(messages.values()) <= 3 * 2 * FEW_MESSAGES
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "60")
    # What was said in it counts for nothing, and all meet the next time.
    met, _ = processes.run(dict.fromkeys(everyone, meets(everyone)))
    assert all(met[process].values == met[0].values for process in everyone)


def test_a_process_that_failed_more_often_is_met_where_it_is(processes, monkeypatch):
    everyone = (0, 1)
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "0.1")
    for _ in range(3):
        met, _ = processes.run({0: meets(everyone)})
        assert "waited 0.1 s for process 1" in str(met[0])
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "60")
    met, _ = processes.run(dict.fromkeys(everyone, meets(everyone)))
    assert met[0].values == met[1].values == {0: 0, 1: 10}


def test_the_first_process_s_answer_is_everybody_s(processes):
    everyone = (3, 5)
    made, _ = processes.run(
        dict.fromkeys(
            everyone,
            lambda me: rendezvous.broadcast(everyone, me, "id", lambda: f"of {me}"),
        )
    )
    assert made == {3: "of 3", 5: "of 3"}


def test_a_round_that_ended_while_a_process_looked_elsewhere_is_no_newer_one(
    processes, store
):
    """A wait times out, and before the next look the peer goes on."""
    everyone = (0, 1)
    wait = store.blocking_key_value_get
    waits = threading.Event()

    def times_out_late(key, milliseconds):
        if not key.endswith("/0/0/verdict") or waits.is_set():
            return wait(key, milliseconds)
        waits.set()
        # Until the other is in the next round, of another purpose.
        deadline = time.monotonic() + 60
        while "make B" not in str(store.entry("jaxcomm/last/0/0")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(milliseconds / 1e3)
        raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")

    store.blocking_key_value_get = times_out_late

    def meets_twice(process):
        first = meets(everyone, "make A")(process)
        return first.values, meets(everyone, "make B")(process).values

    met, _ = processes.run(dict.fromkeys(everyone, meets_twice))
    assert met[0] == met[1] == ({0: 0, 1: 10}, {0: 0, 1: 10})
    assert waits.is_set()
