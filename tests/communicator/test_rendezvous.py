"""How processes meet: in how many messages, and what they are told if they do not.

Processes are threads here. The store is a dictionary that counts what it is asked, and
has a clock of its own: see support/job_store.py. Sets that are larger than a block meet
along a tree, of three levels in planning/test_simulation.py.
"""

import copy
import threading

import pytest
from job_store import meets

from jaxcomm import _ffi, config
from jaxcomm.communicator import peer_info, rendezvous
from jaxcomm.errors import CommunicatorError

# Of a meeting, beside one for each process: what it writes and reads in any case.
FEW_MESSAGES = 24
MANY = tuple(range(10, 80))


def all_met(met, everyone):
    for process in everyone:
        assert met[process].values == {p: 10 * p for p in everyone}, met[process]


def all_meet(store, everyone, what="make it"):
    """Have all of a set meet, and check what they are told."""
    met, messages = store.run(dict.fromkeys(everyone, meets(everyone, what)))
    all_met(met, everyone)
    return messages


def all_told(met, *parts):
    for process, error in met.items():
        assert isinstance(error, CommunicatorError), (process, error)
        for part in parts:
            assert part in str(error), process


@pytest.mark.parametrize("size", [2, 9, 64, 70])
def test_a_meeting_is_a_few_messages_and_at_most_one_for_each_process(store, size):
    """C8, F7."""
    for _ in range(3):
        messages = all_meet(store, tuple(range(size)))
        assert max(messages.values()) <= FEW_MESSAGES + size
    # Its host, its round, its value, the verdict; and a leader's looks.
    assert size < 70 or sorted(messages.values())[size // 2] <= 8
    assert store.now == 0


@pytest.mark.parametrize("order", [1, -1], ids=["rising", "falling"])
def test_messages_stay_few_where_processes_come_one_after_the_other(store, order):
    everyone = tuple(range(32))

    def comes(process):
        store.sleep(0.01 * everyone[::order][process])
        return meets(everyone)(process)

    _, messages = store.run(dict.fromkeys(everyone, comes))
    assert max(messages.values()) <= FEW_MESSAGES + len(everyone)
    # Nobody is missing when the last one comes.
    assert messages[everyone[::order][-1]] <= 4 + FEW_MESSAGES // 2 or order == -1


def test_each_sees_the_thread_of_those_on_its_host(store, monkeypatch):
    hosts = threading.local()
    monkeypatch.setattr(peer_info, "_boot_id", lambda: hosts.name)

    def comes(process):
        hosts.name = "one" if process < 2 else "two"
        return meets((0, 1, 2))(process)

    met, _ = store.run(dict.fromkeys((0, 1, 2), comes))
    seen = {process: [peer[2] for peer in met[process].peers()] for process in met}
    assert seen == {0: [1], 1: [0], 2: []}
    (peer,) = met[0].peers()
    assert peer[1] == _ffi.process_start_time(peer[0])


def test_the_first_process_s_answer_is_everybody_s(store):
    def answers(process):
        return rendezvous.broadcast((3, 5), process, "id", lambda: f"of {process}")

    made, _ = store.run(dict.fromkeys((3, 5), answers))
    assert made == {3: "of 3", 5: "of 3"}


# who is late


@pytest.mark.parametrize(
    ("absent", "named"),
    [
        ([10], "process 10"),
        ([42], "process 42"),
        ([10, 42, 79], "processes 10, 42, 79"),
        (MANY[20:52], f"processes {str(MANY[20:52])[1:-1]}"),
        (MANY[20:60], f"processes {str(MANY[20:53])[1:-1]} and perhaps others"),
    ],
    ids=str,
)
def test_those_that_did_not_come_are_named_and_not_the_ones_they_lead(
    store, absent, named
):
    there = [p for p in MANY if p not in absent]
    met, messages = store.run(dict.fromkeys(there, meets(MANY)))
    all_told(met, f"waited 60 s for {named} of [10, 11, 12, ..., 79] (70")
    # A leader looks at its block in random order.
    assert max(messages.values()) < 8 * len(MANY)
    all_meet(store, MANY)


def test_nobody_gives_up_because_another_does(store, monkeypatch):
    """The first waits for a moment, and comes again. The others wait on meanwhile."""
    here = threading.local()
    monkeypatch.setattr(config, "timeout_seconds", lambda: here.seconds)

    def comes(process):
        here.seconds = 60
        if process == 10:
            here.seconds = 0.5
            with pytest.raises(CommunicatorError):
                meets(MANY)(process)
            store.tell("the first has given up")
            here.seconds = 60
        elif process == 79:
            store.hear("the first has given up")
        return meets(MANY)(process)

    met, _ = store.run(dict.fromkeys(MANY, comes))
    all_met(met, MANY)


def test_a_process_that_failed_more_often_is_met_where_it_is(store):
    for turn in range(3):
        met, messages = store.run({0: meets((0, 1))})
        all_told(met, "waited 60 s for process 1 of [0, 1]")
        assert 60 * (turn + 1) <= store.now < 61 * (turn + 1)
        # A wait gets longer up to two seconds. After each come about six looks.
        assert messages[0] <= 8 * 30
    # What was said counts for nothing.
    all_meet(store, (0, 1))


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
        words = MANY, process, rendezvous.Purpose("agree")
        try:
            return rendezvous.agree(*words, lambda c: (c.collect(1), c.collect(2)))
        except KeyboardInterrupt:
            return rendezvous.agree(*words, lambda c: (c.collect(1), c.collect(2)))

    store.blocking_key_value_get = is_interrupted
    met, _ = store.run(dict.fromkeys(MANY, comes))
    assert interrupted.is_set()
    right = dict.fromkeys(MANY, 1), dict.fromkeys(MANY, 2)
    assert all(met[process] == right for process in MANY), met


def test_a_process_that_was_started_anew_is_told(store, monkeypatch):
    """Its rounds of before are over: their values are not those of now."""
    all_meet(store, (0, 1))
    # Another client of the same entries has met nobody.
    copy.copy(store).serve(monkeypatch)
    met, _ = store.run({1: meets((0, 1))})
    all_told(met, "process 1 met processes [0, 1] before: it was started anew")


# who wants something else


@pytest.mark.parametrize("other", [10, 42, 79])
def test_one_of_another_purpose_is_told_to_all_soon(store, other):
    functions = dict.fromkeys(MANY, meets(MANY, "make A", number=2))
    met, _ = store.run(functions | {other: meets(MANY, "make B", number=5)})
    # A wait or two: who told a leader is looked up in random order.
    assert store.now <= 2
    all_told(
        met,
        "processes [10, 11, 12, ..., 79] (70 processes) are out of step",
        f"process {other} is to make B, its number 5",
        "is to make A, its number 2",
        "call jaxcomm.init with the same arguments",
    )
    # They go on together.
    all_meet(store, MANY)


def test_the_same_words_for_different_keys_are_different_things(store):
    met, _ = store.run({0: meets((0, 1), key=1), 1: meets((0, 1), key=2)})
    all_told(met, "out of step")


def test_different_purposes_are_told_although_their_leader_is_late(store):
    functions = dict.fromkeys(MANY[1:], meets(MANY, "make A"))
    met, _ = store.run(functions | {11: meets(MANY, "make B")})
    all_told(met, "process 11 is to make B; process 12 is to make A")
    met, _ = store.run({10: meets(MANY, "make A")})
    all_told(met, "process 11 is to make B")


# who waits in another set


@pytest.mark.parametrize(
    ("one", "other", "slow"),
    [
        ((0, 1), (0, 1, 2), 0),
        ((0, 1), (0, 1, 2), 1),
        (MANY, (20, 30, 90), None),
        # The leaders of both sets are in one of them only.
        (MANY, (5, 30, 40), None),
    ],
    ids=["the one finds out first", "the other does", "many", "leaders"],
)
def test_processes_that_wait_for_each_other_in_different_sets_are_told(
    store, one, other, slow
):
    """Each makes first what the other makes after it."""
    store.slow.add(slow)
    there = dict.fromkeys(set(other) - {0, 20, 40}, meets(other, "make B"))
    met, _ = store.run(dict.fromkeys(one, meets(one, "make A")) | there)
    all_told(met, " is to make A", " is to make B", "are out of step: process ")
    # Nothing of it is left. Who raised it in one set may go on in the other.
    store.slow.clear()
    all_meet(store, one, "make A")
    all_meet(store, other, "make B")


def test_who_comes_when_such_processes_have_given_up_is_told_too(store):
    store.slow.add(0)
    store.run({0: meets((0, 1), "make A"), 1: meets((0, 1, 2), "make B")})
    met, _ = store.run({2: meets((0, 1, 2), "make B")})
    all_told(met, "process 0 is to make A; process 1 is to make B")


def test_a_meeting_that_is_over_is_no_reason_to_wait(store):
    """What a process was at last may be long done: it computes."""
    all_meet(store, (0, 1, 2), "make B")

    def later(process):
        store.sleep(30)
        return meets((0, 1), "make A")(process)

    met, _ = store.run({0: meets((0, 1), "make A"), 1: later})
    all_met(met, (0, 1))


def test_a_round_that_ended_while_a_process_looked_elsewhere_is_no_newer_one(store):
    """A wait times out, and before the next look the peer goes on."""
    wait, enters = store.blocking_key_value_get, store.key_value_set
    has_waited = threading.Event()

    def times_out_late(key, milliseconds):
        if not key.endswith("/0/0/verdict") or has_waited.is_set():
            return wait(key, milliseconds)
        has_waited.set()
        store.hear("the other is in the next round")
        store.sleep(milliseconds / 1e3)
        raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")

    def tell(key, text, allow_overwrite=False):
        enters(key, text, allow_overwrite)
        if key == "jaxcomm/last/0/0" and "make B" in text:
            store.tell("the other is in the next round")

    store.blocking_key_value_get, store.key_value_set = times_out_late, tell

    def meets_twice(process):
        return [meets((0, 1), f"make {a}")(process).values for a in "AB"]

    met, _ = store.run(dict.fromkeys((0, 1), meets_twice))
    assert met[0] == met[1] == [{0: 0, 1: 10}] * 2
    assert has_waited.is_set()
