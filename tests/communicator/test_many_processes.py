"""Processes of a set that is larger than a block meet along a tree."""

import collections
import threading
import types

import pytest
from job_store import meets

from jaxcomm.communicator import phase, rendezvous, rounds
from jaxcomm.errors import CommunicatorError

# Three levels would take a thousand threads; the simulation has them.
EVERYONE = tuple(range(10, 80))


def comes_when(event, function):
    def comes(process):
        assert event.wait(60)
        return function(process)

    return comes


def run_without(processes, absent, function):
    return processes.run({p: function for p in EVERYONE if p not in absent})


@pytest.mark.usefixtures("patient")
def test_values_of_all_come_back_to_all(processes):
    met, messages = processes.run(dict.fromkeys(EVERYONE, meets(EVERYONE)))
    for process in EVERYONE:
        assert met[process].values == {p: 10 * p for p in EVERYONE}
    # Its host, its round, its value, the verdict; and a leader's looks.
    assert sorted(messages.values())[len(EVERYONE) // 2] <= 8


@pytest.fixture
def deadline_when_waiting(monkeypatch, store):
    """Gives ``deadline_when_waiting(count)``: when so many wait for the fourth time.

    As in three seconds, after which nobody can say whether all of many threads have
    come. But whoever waits has come.
    """

    def pass_when(count):
        wait, now = store.blocking_key_value_get, [0.0]
        waits, lock = collections.Counter(), threading.Lock()

        def wait_and_count(key, milliseconds):
            with lock:
                waits[threading.get_ident()] += 1
                if sum(times >= 4 for times in waits.values()) == count:
                    now[0] = 1000.0
            return wait(key, milliseconds)

        clock = types.SimpleNamespace(monotonic=lambda: now[0])
        monkeypatch.setattr(store, "blocking_key_value_get", wait_and_count)
        for module in (phase, rounds):
            monkeypatch.setattr(module, "time", clock)

    return pass_when


@pytest.mark.parametrize("absent", [[10], [42], [79], [10, 42, 43]], ids=str)
def test_those_that_did_not_come_are_named_and_not_the_ones_they_lead(
    processes, monkeypatch, absent, deadline_when_waiting
):
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "3")
    deadline_when_waiting(len(EVERYONE) - len(absent))
    met, messages = run_without(processes, absent, meets(EVERYONE))
    named = ", ".join(map(str, absent))
    word = "process" if len(absent) == 1 else "processes"
    for process, error in met.items():
        assert f"waited 3 s for {word} {named} of [10, 11, 12, ..., 79] (70" in str(
            error
        ), process
    # A leader looks at its block in random order: 15 to 43 messages were seen.
    assert max(messages.values()) < len(EVERYONE)
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "60")
    met, _ = processes.run(dict.fromkeys(EVERYONE, meets(EVERYONE)))
    assert all(met[p].values == met[10].values for p in EVERYONE)


def test_of_very_many_some_are_named(processes, monkeypatch, deadline_when_waiting):
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "3")
    deadline_when_waiting(len(EVERYONE) - 40)
    met, _ = run_without(processes, set(EVERYONE[20:60]), meets(EVERYONE))
    for error in met.values():
        assert "waited 3 s for processes 30, 31, 32, " in str(error)
        assert ", 62 and perhaps others of [10, 11, 12, ..., 79] (70" in str(error)


def test_one_that_comes_late_is_met_by_those_that_still_wait(processes, monkeypatch):
    """Others have given up meanwhile, and come again."""
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "2")
    gave_up = threading.Event()
    told = []

    def comes(process):
        try:
            return meets(EVERYONE)(process)
        except CommunicatorError as error:
            told.append(str(error))
            monkeypatch.setenv("JAXCOMM_TIMEOUT", "60")
            gave_up.set()
            return meets(EVERYONE)(process)

    functions = dict.fromkeys(EVERYONE, comes)
    functions[79] = comes_when(gave_up, meets(EVERYONE))
    met, _ = processes.run(functions)
    for process in EVERYONE:
        assert met[process].values == {p: 10 * p for p in EVERYONE}, met[process]
    # On a loaded machine some of the others may have been late, too.
    assert any("for process 79 of" in text for text in told)


def test_nobody_gives_up_because_another_does(processes, monkeypatch):
    """The first waits for a moment, and comes again. The others wait on meanwhile."""
    here = threading.local()
    monkeypatch.setattr(rounds.config, "timeout_seconds", lambda: here.seconds)
    gave_up = threading.Event()

    def comes(process):
        here.seconds = 0.5 if process == 10 else 20
        return meets(EVERYONE)(process)

    def comes_again(process):
        try:
            return comes(process)
        except CommunicatorError:
            gave_up.set()
            here.seconds = 20
            return meets(EVERYONE)(process)

    functions = dict.fromkeys(EVERYONE, comes)
    functions |= {10: comes_again, 79: comes_when(gave_up, comes)}
    met, _ = processes.run(functions)
    for process in EVERYONE:
        assert met[process].values == {p: 10 * p for p in EVERYONE}, met[process]
    assert gave_up.is_set()


@pytest.mark.parametrize("other", [10, 42, 50, 79])
def test_one_of_another_purpose_is_told_to_all(processes, other):
    functions = dict.fromkeys(EVERYONE, meets(EVERYONE, "make A"))
    functions[other] = meets(EVERYONE, "make B")
    met, _ = processes.run(functions)
    for process in EVERYONE:
        text = str(met[process])
        assert f"process {other} is to make B" in text, text
        assert "is to make A" in text


def test_different_purposes_are_told_although_their_leader_is_late(processes):
    functions = dict.fromkeys(EVERYONE[1:], meets(EVERYONE, "make A"))
    functions[11] = meets(EVERYONE, "make B")
    met, _ = processes.run(functions)
    for process in EVERYONE[1:]:
        assert "process 11 is to make B; process 12 is to make A" in str(met[process])


@pytest.mark.parametrize("few", [(20, 30, 90), (5, 30, 40)], ids=str)
def test_sets_that_wait_for_each_other_are_told(processes, few):
    """In the second case the leaders of both sets are in one of them only."""
    there = set(few) - {20, 40}
    functions = dict.fromkeys(EVERYONE, meets(EVERYONE, "make A"))
    functions |= dict.fromkeys(there, meets(few, "make B"))
    met, _ = processes.run(functions)
    for process in (*EVERYONE, *there):
        text = str(met[process])
        assert " is to make A" in text, text
        assert " is to make B" in text
    # Who raised it in one set may go on in the other.
    met, _ = processes.run(dict.fromkeys(EVERYONE, meets(EVERYONE, "make A")))
    assert all(met[p].values == met[10].values for p in EVERYONE), met[30]
    met, _ = processes.run(dict.fromkeys(few, meets(few, "make B")))
    assert met[few[0]].values == {p: 10 * p for p in few}


def test_a_process_that_fails_between_two_exchanges_is_met_again(processes):
    failed = threading.Event()

    def step(current):
        first = current.collect(1)
        if first and not failed.is_set():
            failed.set()
            raise ValueError("a step fails")
        return first, current.collect(2)

    def comes(process):
        def agree():
            purpose = rendezvous.Purpose("agree")
            return rendezvous.agree(EVERYONE, process, purpose, step)

        try:
            return agree()
        except ValueError:
            return agree()

    met, _ = processes.run(dict.fromkeys(EVERYONE, comes))
    ones, twos = dict.fromkeys(EVERYONE, 1), dict.fromkeys(EVERYONE, 2)
    assert all(met[process] == (ones, twos) for process in EVERYONE), met
    assert failed.is_set()


def test_a_process_that_is_interrupted_when_a_verdict_is_there_is_met_again(
    processes, store
):
    wait = store.blocking_key_value_get
    interrupted = threading.Event()

    def is_interrupted(key, milliseconds):
        found = wait(key, milliseconds)
        is_verdict = key.endswith("/0/0/verdict")
        if is_verdict and here.index == 79 and not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt
        return found

    def comes(process):
        here.index = process

        def agree():
            purpose = rendezvous.Purpose("agree")
            return rendezvous.agree(EVERYONE, process, purpose, step)

        try:
            return agree()
        except KeyboardInterrupt:
            return agree()

    def step(current):
        return current.collect(1), current.collect(2)

    here = threading.local()
    store.blocking_key_value_get = is_interrupted
    met, _ = processes.run(dict.fromkeys(EVERYONE, comes))
    assert interrupted.is_set()
    ones, twos = dict.fromkeys(EVERYONE, 1), dict.fromkeys(EVERYONE, 2)
    assert all(met[process] == (ones, twos) for process in EVERYONE), met


def test_a_process_that_was_started_anew_is_told(processes, store):
    """Its rounds of before are over: their values are not those of now."""
    processes.run(dict.fromkeys((0, 1), meets((0, 1))))
    pasts = rounds._pasts
    for past in pasts.values():
        past.finished.pop(((0, 1), 1), None)
    met, _ = processes.run({1: meets((0, 1))})
    assert "process 1 met processes [0, 1] before: it was started anew" in str(met[1])
