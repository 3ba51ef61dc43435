"""F2: a failure of one process becomes a failure of those that share a world with it.

Here with a store in memory; tests/processes/test_failures.py has the real one.
"""

import threading
import time
import weakref

import pytest

from jaxcomm.communicator.failures import FailureWatch

SECONDS = 60  # For a loaded machine; each wait takes some tens of milliseconds.


class Store:
    """What the watch uses of jax.distributed's key-value store, in memory."""

    def __init__(self):
        self._lock = threading.Lock()
        self.entries = {}
        self.is_gone = False
        self.looks = 0

    def _check(self):
        if self.is_gone:
            raise RuntimeError("UNAVAILABLE: failed to connect to all addresses")

    def key_value_set(self, key, text, allow_overwrite=False):
        with self._lock:
            self._check()
            if key in self.entries and not allow_overwrite:
                raise RuntimeError("ALREADY_EXISTS")
            self.entries[key] = text

    def key_value_dir_get(self, folder):
        with self._lock:
            self.looks += 1
            self._check()
            assert folder.endswith("/")
            return [(k, v) for k, v in self.entries.items() if k.startswith(folder)]

    def key_value_increment(self, key, by):
        with self._lock:
            self._check()
            self.entries[key] = str(int(self.entries.get(key, 0)) + by)
            return int(self.entries[key])


class Process:
    """A process with worlds: its own first failure, and what others made it fail of."""

    def __init__(self, index, store, **options):
        self.own = ""
        self.received = []
        options = {"tick": 0.005, "interval": 0.01} | options
        self.watch = FailureWatch(
            store, index, lambda: self.own, self._fail_worlds, **options
        )

    def _fail_worlds(self, reason):
        self.received.append(reason)
        # The extension then reports that failure, if it has no earlier one.
        self.own = self.own or reason


def until(condition, what):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def start(store):
    """Gives ``start(index, *worlds)``: a process that watches them."""
    processes = []

    def start_one(index, *worlds, **options):
        processes.append(Process(index, store, **options))
        for world in worlds:
            processes[-1].watch.watch(world)
        return processes[-1]

    yield start_one
    for process in processes:
        process.watch.stop()
    for process in processes:
        until(lambda process=process: not process.watch.is_running(), "a thread stays")


def looked_again(store, times=3):
    """Waits for some more looks into the store, by which a failure would be heard."""
    seen = store.looks
    until(lambda: store.looks >= seen + times, "nobody looks")


def test_others_hear_who_failed_and_why(store, start):
    first, second, third = (start(index, "w") for index in range(3))
    second.own = "all_gather: rank 1 is gone"
    until(lambda: first.received and third.received, "they did not hear")
    told = ["process 1 failed first: all_gather: rank 1 is gone"]
    assert (first.received, second.received, third.received) == (told, [], told)


@pytest.mark.parametrize("text", ["", "{}", '{"order": 1, "process": 1, "text": "x"}'])
def test_a_failure_that_cannot_be_read_is_one_too(store, start, text):
    first = start(0, "w")
    store.key_value_set("jaxcomm/failures/w/1", text)
    until(lambda: first.received, "it did not hear")
    (told,) = first.received
    assert told.startswith("process 1 failed first: entry 'jaxcomm/failures/w/1' of")
    assert f"holds {text!r}" in told


def test_they_are_told_once(store, start):
    first, second = start(0, "w"), start(1, "w")
    bystander = start(2, "other")  # keeps looking
    first.own = "broken"
    until(lambda: second.received, "it did not hear")
    looked_again(store)
    assert second.received == ["process 0 failed first: broken"]
    assert bystander.received == []


def test_of_two_that_fail_both_keep_their_own_and_the_rest_hear_of_the_first(
    store, start
):
    # They look into the store once, before anything failed.
    failed = [start(index, "w", interval=1000) for index in range(2)]
    until(lambda: store.looks == 2, "they do not look")
    failed[1].own = "the first"
    until(lambda: any(key.endswith("/w/1") for key in store.entries), "not published")
    failed[0].own = "the second"
    until(lambda: any(key.endswith("/w/0") for key in store.entries), "not published")
    third = start(2, "w")
    until(lambda: third.received, "it did not hear")
    assert third.received == ["process 1 failed first: the first"]
    assert [process.received for process in failed] == [[], []]


def test_two_that_fail_at_the_same_time_keep_their_own(store, start, monkeypatch):
    both, increment = threading.Barrier(2), store.key_value_increment

    def increment_together(key, by):
        both.wait(SECONDS)
        return increment(key, by)

    # Neither is published before both are about to be.
    monkeypatch.setattr(store, "key_value_increment", increment_together)
    failed = [start(index, "w", interval=0.2) for index in range(2)]
    third = start(2, "w", interval=0.2)
    for process in failed:
        process.own = f"of process {process.watch._process}"
    until(lambda: third.received, "it did not hear")
    until(lambda: len([k for k in store.entries if "/w/" in k]) >= 2, "not published")
    assert [process.received for process in failed] == [[], []]
    assert [process.own for process in failed] == ["of process 0", "of process 1"]
    assert third.received[0] in {
        f"process {i} failed first: of process {i}" for i in range(2)
    }


def test_a_failure_reaches_processes_that_share_a_world_with_one_that_heard(
    store, start
):
    first = start(0, "left")
    middle = start(1, "left", "right")
    last = start(2, "right")
    first.own = "broken"
    until(lambda: last.received, "it did not hear")
    assert middle.received == ["process 0 failed first: broken"]
    assert last.received == [f"process 1 failed first: {middle.received[0]}"]


def test_who_shares_no_world_lives_on(store, start):
    failed, other = start(0, "w"), start(1, "other")
    failed.own = "broken"
    until(lambda: any("/w/0" in key for key in store.entries), "not published")
    looked_again(store)
    assert other.received == []


def test_worlds_made_anew_know_nothing_of_old_failures(store, start):
    """Whether or not the extension still reports the old one."""
    for cleared in (True, False):
        first, second = start(0, f"old {cleared}"), start(1, f"old {cleared}")
        first.own = "broken"
        until(lambda second=second: second.received, "it did not hear")
        if cleared:
            first.own = second.own = ""
        first.watch.watch(f"new {cleared}")
        second.watch.watch(f"new {cleared}")
        looked_again(store)
        assert (first.received, len(second.received)) == ([], 1)
        assert not any(f"/new {cleared}/" in key for key in store.entries)
        first.own = "broken again"
        until(lambda second=second: len(second.received) == 2, "it did not hear")
        assert second.received[1] == "process 0 failed first: broken again"


def test_the_same_text_is_news_where_it_was_gone_in_between(store, start):
    first, second = start(0, "old"), start(1, "old")
    first.own = "broken"
    until(lambda: second.received, "it did not hear")
    for process in (first, second):
        process.watch.watch("new")
    looked_again(store)
    first.own = second.own = ""
    looked_again(store)
    first.own = "broken"
    until(lambda: len(second.received) == 2, "it did not hear")


def test_what_failed_is_told_before_the_end(store, start):
    process = start(0, "w", tick=1000)
    process.own = "broken"
    process.watch.stop()
    assert any("/w/0" in key for key in store.entries)


def test_the_thread_ends_when_it_is_told_to_and_when_the_store_is_gone(store, start):
    def threads():
        return [t for t in threading.enumerate() if t.name == "jaxcomm-failures"]

    # Those of other tests have been told to end.
    until(lambda: threads() == [], "others stay")
    stopped = start(0, "w")
    looked_again(store)
    assert len(threads()) == 1
    stopped.watch.stop()
    until(lambda: threads() == [], "it stays")
    cut_off = start(1, "w", give_up=0.05)
    looked_again(store)
    store.is_gone = True
    until(lambda: threads() == [], "it stays")
    assert cut_off.received == []
    # A world that is made later, with a store that is back, is watched again.
    store.is_gone = False
    cut_off.watch.watch("later")
    looked_again(store)
    assert len(threads()) == 1


def test_a_store_that_is_gone_for_a_moment_loses_no_failure(store, start):
    first, second = start(0, "w", give_up=SECONDS), start(1, "w", give_up=SECONDS)
    store.is_gone = True
    first.own = "broken"
    looked_again(store)
    store.is_gone = False
    until(lambda: second.received, "it did not hear")


def test_nobody_asks_the_store_once_the_worlds_are_gone(store, start):
    class World:
        pass

    world = World()
    process = start(0)
    process.watch.watch("w", weakref.ref(world))
    looked_again(store)
    del world
    until(lambda: not process.watch._worlds, "it is still watched")

    def is_not_asked():
        seen = store.looks
        time.sleep(0.5)
        return store.looks == seen

    # One look may be under way.
    until(is_not_asked, "it is asked all the same")
    process.watch.watch("another")
    looked_again(store)


def test_ten_rounds_leave_no_thread(store, start):
    before = threading.active_count()
    for turn in range(10):
        process = start(0, f"w{turn}")
        process.watch.stop()
    # Threads of others may end meanwhile.
    until(lambda: threading.active_count() <= before, "threads are left")


def test_between_looks_the_thread_sleeps(start):
    looks = []
    process = start(0, tick=0.05)
    process.watch._first_failure = lambda: looks.append(time.monotonic()) or ""
    process.watch.watch("w")
    until(lambda: len(looks) >= 6, "it does not look")
    # Two looks beside the ticks: one by watch(), one of a thread that just began.
    assert len(looks) <= (looks[-1] - looks[0]) / 0.05 + 3
