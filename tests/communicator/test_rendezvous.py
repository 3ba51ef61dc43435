"""How processes meet: in how many messages, and what they are told if they do not.

Processes are threads here. The store is a dictionary that counts what it is asked, and
has a clock of its own: see support/job_store.py.
"""

import copy
import threading

import pytest
from job_store import meets

from jaxcomm import _ffi
from jaxcomm.communicator import peer_info, rendezvous

# Of a meeting, beside one for each process: what it writes and reads in any case.
FEW_MESSAGES = 24


def all_meet(store, everyone, what="make it"):
    """Have all of a set meet, and check what they are told."""
    met, messages = store.run(dict.fromkeys(everyone, meets(everyone, what)))
    for process in everyone:
        assert met[process].values == {p: 10 * p for p in everyone}, met[process]
    return messages


@pytest.mark.parametrize("size", [2, 9, 64])
def test_a_meeting_is_a_few_messages_and_at_most_one_for_each_process(store, size):
    """C8, F7."""
    for _ in range(3):
        messages = all_meet(store, tuple(range(size)))
        assert max(messages.values()) <= FEW_MESSAGES + size


def test_messages_do_not_grow_with_processes_that_are_there_already(store):
    everyone = tuple(range(1000, 1128))

    def comes_last(process):
        store.sleep(0.01)
        return meets(everyone)(process)

    last = everyone[-1]
    _, messages = store.run(
        dict.fromkeys(everyone, meets(everyone)) | {last: comes_last}
    )
    # Three are written, one is read: nobody is missing when it comes.
    assert messages[last] <= 4 + FEW_MESSAGES // 2


@pytest.mark.parametrize("order", [1, -1], ids=["rising", "falling"])
def test_messages_stay_few_where_processes_come_one_after_the_other(store, order):
    everyone = tuple(range(32))

    def comes(process):
        store.sleep(0.01 * everyone[::order][process])
        return meets(everyone)(process)

    _, messages = store.run(dict.fromkeys(everyone, comes))
    assert max(messages.values()) <= FEW_MESSAGES + len(everyone)


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


def test_the_same_words_for_different_keys_are_different_things(store):
    met, _ = store.run({0: meets((0, 1), key=1), 1: meets((0, 1), key=2)})
    assert all("out of step" in str(met[process]) for process in (0, 1))


def test_who_comes_late_to_a_disagreement_is_told_of_it_too(store):
    everyone = (0, 1, 2)
    store.run({0: meets(everyone, "make A"), 1: meets(everyone, "make B")})
    met, _ = store.run({2: meets(everyone, "make A")})
    assert "process 1 is to make B" in str(met[2])


@pytest.mark.parametrize("last", [0, 1], ids=["the one is", "the other is"])
def test_processes_that_wait_for_each_other_in_different_sets_are_told(store, last):
    """Each makes first what the other makes after it; one of them finds out first."""
    store.slow.add(last)
    both = {p: meets((0, 1, 2), "make B") for p in (1, 2)}
    met, _ = store.run({0: meets((0, 1), "make A")} | both)
    for process in (0, 1, 2):
        text = str(met[process])
        assert "are out of step: process 0 is to make A; process " in text, met
        assert " is to make B" in text
    # Nothing of it is left.
    store.slow.clear()
    all_meet(store, (0, 1, 2), "make B")
    all_meet(store, (0, 1), "make A")


def test_who_comes_when_such_processes_have_given_up_is_told_too(store):
    store.slow.add(0)
    store.run({0: meets((0, 1), "make A"), 1: meets((0, 1, 2), "make B")})
    met, _ = store.run({2: meets((0, 1, 2), "make B")})
    assert "process 0 is to make A; process 1 is to make B" in str(met[2])


def test_a_meeting_that_is_over_is_no_reason_to_wait(store):
    """What a process was at last may be long done: it computes."""
    all_meet(store, (0, 1, 2), "make B")

    def later(process):
        store.sleep(30)
        return meets((0, 1), "make A")(process)

    met, _ = store.run({0: meets((0, 1), "make A"), 1: later})
    assert met[0].values == {0: 0, 1: 10}


def test_a_process_that_failed_more_often_is_met_where_it_is(store):
    for turn in range(3):
        met, messages = store.run({0: meets((0, 1))})
        assert "waited 60 s for process 1 of [0, 1]" in str(met[0])
        assert 60 * (turn + 1) <= store.now < 61 * (turn + 1)
        # A wait gets longer up to two seconds. After each come about six looks.
        assert messages[0] <= 8 * 30
    # What was said counts for nothing.
    all_meet(store, (0, 1))


def test_the_first_process_s_answer_is_everybody_s(store):
    everyone = (3, 5)
    made, _ = store.run(
        dict.fromkeys(
            everyone,
            lambda me: rendezvous.broadcast(everyone, me, "id", lambda: f"of {me}"),
        )
    )
    assert made == {3: "of 3", 5: "of 3"}


def test_a_round_that_ended_while_a_process_looked_elsewhere_is_no_newer_one(store):
    """A wait times out, and before the next look the peer goes on."""
    everyone = (0, 1)
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
        first = meets(everyone, "make A")(process)
        return first.values, meets(everyone, "make B")(process).values

    met, _ = store.run(dict.fromkeys(everyone, meets_twice))
    assert met[0] == met[1] == ({0: 0, 1: 10}, {0: 0, 1: 10})
    assert has_waited.is_set()


def test_a_process_that_was_started_anew_is_told(store, monkeypatch):
    """Its rounds of before are over: their values are not those of now."""
    all_meet(store, (0, 1))
    # Another client of the same entries has met nobody.
    copy.copy(store).serve(monkeypatch)
    met, _ = store.run({1: meets((0, 1))})
    assert "process 1 met processes [0, 1] before: it was started anew" in str(met[1])
