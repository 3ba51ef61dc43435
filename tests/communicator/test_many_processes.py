"""Processes of a set that is larger than a block meet along a tree."""

import threading

import pytest
from job_store import meets

from jaxcomm import config
from jaxcomm.communicator import rendezvous
from jaxcomm.errors import CommunicatorError

# Three levels would take a thousand threads; the simulation has them.
EVERYONE = tuple(range(10, 80))


def all_meet(store, everyone=EVERYONE, what="make it"):
    """Have all of a set meet, and check what they are told."""
    met, messages = store.run(dict.fromkeys(everyone, meets(everyone, what)))
    for process in everyone:
        assert met[process].values == {p: 10 * p for p in everyone}, met[process]
    return messages


def test_values_of_all_come_back_to_all(store):
    messages = all_meet(store)
    # Its host, its round, its value, the verdict; and a leader's looks.
    assert sorted(messages.values())[len(EVERYONE) // 2] <= 8
    assert store.now == 0


@pytest.mark.parametrize(
    ("absent", "named"),
    [
        ([10], "process 10"),
        ([42], "process 42"),
        ([79], "process 79"),
        ([10, 42, 43], "processes 10, 42, 43"),
        (EVERYONE[20:52], f"processes {str(EVERYONE[20:52])[1:-1]}"),
        (EVERYONE[20:60], f"processes {str(EVERYONE[20:53])[1:-1]} and perhaps others"),
    ],
    ids=str,
)
def test_those_that_did_not_come_are_named_and_not_the_ones_they_lead(
    store, absent, named
):
    there = [p for p in EVERYONE if p not in absent]
    met, messages = store.run(dict.fromkeys(there, meets(EVERYONE)))
    for error in met.values():
        text = f"waited 60 s for {named} of [10, 11, 12, ..., 79] (70"
        assert text in str(error)
    # A leader looks at its block in random order.
    assert max(messages.values()) < 8 * len(EVERYONE)
    all_meet(store)


def test_one_that_comes_late_is_met_by_those_that_still_wait(store):
    """Others have given up meanwhile, and come again."""
    told = []

    def comes(process):
        try:
            return meets(EVERYONE)(process)
        except CommunicatorError as error:
            told.append(str(error))
            store.tell("some have given up")
            return meets(EVERYONE)(process)

    def late(process):
        store.hear("some have given up")
        return meets(EVERYONE)(process)

    met, _ = store.run(dict.fromkeys(EVERYONE, comes) | {79: late})
    for process in EVERYONE:
        assert met[process].values == {p: 10 * p for p in EVERYONE}, met[process]
    assert told
    assert all("for process 79 of" in text for text in told)


def test_nobody_gives_up_because_another_does(store, monkeypatch):
    """The first waits for a moment, and comes again. The others wait on meanwhile."""
    here = threading.local()
    monkeypatch.setattr(config, "timeout_seconds", lambda: here.seconds)

    def comes(process):
        here.seconds = 60
        return meets(EVERYONE)(process)

    def comes_again(process):
        here.seconds = 0.5
        with pytest.raises(CommunicatorError):
            meets(EVERYONE)(process)
        store.tell("the first has given up")
        return comes(process)

    def late(process):
        store.hear("the first has given up")
        return comes(process)

    functions = dict.fromkeys(EVERYONE, comes) | {10: comes_again, 79: late}
    met, _ = store.run(functions)
    for process in EVERYONE:
        assert met[process].values == {p: 10 * p for p in EVERYONE}, met[process]


@pytest.mark.parametrize("other", [10, 42, 79])
def test_one_of_another_purpose_is_told_to_all_soon(store, other):
    functions = dict.fromkeys(EVERYONE, meets(EVERYONE, "make A", number=2))
    met, _ = store.run(functions | {other: meets(EVERYONE, "make B", number=5)})
    # A wait or two: who told a leader is looked up in random order.
    assert store.now <= 2
    for process in EVERYONE:
        text = str(met[process])
        assert isinstance(met[process], CommunicatorError), text
        assert "processes [10, 11, 12, ..., 79] (70 processes) are out of step" in text
        assert f"process {other} is to make B, its number 5" in text
        assert "is to make A, its number 2" in text
        assert "call jaxcomm.init with the same arguments" in text
    # They go on together.
    all_meet(store)


def test_different_purposes_are_told_although_their_leader_is_late(store):
    functions = dict.fromkeys(EVERYONE[1:], meets(EVERYONE, "make A"))
    met, _ = store.run(functions | {11: meets(EVERYONE, "make B")})
    for process in EVERYONE[1:]:
        assert "process 11 is to make B; process 12 is to make A" in str(met[process])


@pytest.mark.parametrize("few", [(20, 30, 90), (5, 30, 40)], ids=str)
def test_sets_that_wait_for_each_other_are_told(store, few):
    """In the second case the leaders of both sets are in one of them only."""
    there = dict.fromkeys(set(few) - {20, 40}, meets(few, "make B"))
    functions = dict.fromkeys(EVERYONE, meets(EVERYONE, "make A")) | there
    met, _ = store.run(functions)
    for process in functions:
        text = str(met[process])
        assert " is to make A" in text, text
        assert " is to make B" in text
    # Who raised it in one set may go on in the other.
    all_meet(store, EVERYONE, "make A")
    all_meet(store, few, "make B")


def agrees_again(process, step):
    """Have a process agree with all, once more if it fails itself."""
    purpose = rendezvous.Purpose("agree")
    try:
        return rendezvous.agree(EVERYONE, process, purpose, step)
    except (ValueError, KeyboardInterrupt):
        return rendezvous.agree(EVERYONE, process, purpose, step)


ONES, TWOS = dict.fromkeys(EVERYONE, 1), dict.fromkeys(EVERYONE, 2)


def test_a_process_that_fails_between_two_exchanges_is_met_again(store):
    failed = threading.Event()

    def comes(process):
        def step(current):
            first = current.collect(1)
            if process == 42 and not failed.is_set():
                failed.set()
                raise ValueError("a step fails")
            return first, current.collect(2)

        return agrees_again(process, step)

    met, _ = store.run(dict.fromkeys(EVERYONE, comes))
    assert all(met[process] == (ONES, TWOS) for process in EVERYONE), met
    assert failed.is_set()


def test_a_process_that_is_interrupted_when_a_verdict_is_there_is_met_again(store):
    wait = store.blocking_key_value_get
    interrupted = threading.Event()
    here = threading.local()

    def is_interrupted(key, milliseconds):
        found = wait(key, milliseconds)
        is_verdict = key.endswith("/0/0/verdict")
        if is_verdict and here.process == 79 and not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt
        return found

    def comes(process):
        here.process = process
        return agrees_again(
            process, lambda current: (current.collect(1), current.collect(2))
        )

    store.blocking_key_value_get = is_interrupted
    met, _ = store.run(dict.fromkeys(EVERYONE, comes))
    assert interrupted.is_set()
    assert all(met[process] == (ONES, TWOS) for process in EVERYONE), met
