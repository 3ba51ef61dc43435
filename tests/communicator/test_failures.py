"""F2: a failure of one process becomes a failure of those that share a world with it.

Here with a store in memory; tests/nccl/test_failing_processes.py has the real one.
"""

import pytest
import waiting
from job_store import JobStore

from jaxcomm.communicator import failures
from jaxcomm.communicator import store as product


class Store(JobStore):
    """A store that may be gone, and counts how often it is looked into."""

    is_gone = False
    looks = 0

    def key_value_dir_get(self, folder):
        with self._lock:
            self.looks += 1
            self._count()
            found = [pair for each in self._folders.values() for pair in each.items()]
        return [pair for pair in found if pair[0].startswith(folder)]

    def _count(self):
        super()._count()
        if self.is_gone:
            raise RuntimeError("UNAVAILABLE: failed to connect to all addresses")

    def has(self, name):
        return f"jaxcomm/failures/{name}" in self.all_keys()


class Process:
    """A process with worlds: its own first failure, and what others made it fail of."""

    def __init__(self, index, store, *worlds, **options):
        self.own = ""
        self.received = []
        self.looks = 0
        options = {"tick": 0.002, "interval": 0.005} | options
        self.watch = failures.FailureWatch(
            product.Store(store),
            index,
            self._first_failure,
            self._fail_worlds,
            **options,
        )
        for world in worlds:
            self.watch.watch(world)

    def _first_failure(self):
        self.looks += 1
        return self.own

    def _fail_worlds(self, reason):
        self.received.append(reason)
        # The extension then reports that failure, if it has no earlier one.
        self.own = self.own or reason

    def hears(self, times=1):
        waiting.until(lambda: len(self.received) >= times, "it hears")
        return self.received


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def start(store):
    processes = []

    def start_one(index, *worlds, **options):
        processes.append(Process(index, store, *worlds, **options))
        return processes[-1]

    yield start_one
    for process in processes:
        process.watch.stop()
    for process in processes:
        waiting.until(lambda process=process: not process.watch.is_running())


def looked_again(store, times=3):
    """Waits for some more looks into the store, by which a failure would be heard."""
    seen = store.looks
    waiting.until(lambda: store.looks >= seen + times, "more looks")


def test_others_hear_once_who_failed_and_why_and_who_shares_no_world_does_not(
    store, start
):
    first, second, third = (start(index, "w") for index in range(3))
    bystander = start(3, "other")
    second.own = "all_gather: rank 1 is gone"
    told = ["process 1 failed first: all_gather: rank 1 is gone"]
    assert first.hears() == third.hears() == told
    looked_again(store)
    assert first.received == third.received == told
    assert second.received == bystander.received == []


def test_a_process_that_failed_and_ended_elsewhere_fails_its_worlds(store):
    """It can publish nothing any more: the launcher tells it."""
    ends, found = {2: 0}, []
    watch = failures.FailureWatch(
        product.Store(store),
        0,
        lambda: "",
        found.append,
        lambda: ends,
        tick=0.002,
        interval=0.005,
    )
    watch.watch("w", processes=(0, 1, 2))
    watch.watch("other", processes=(0, 2))
    looked_again(store)
    assert found == []
    ends[1] = 137
    waiting.until(lambda: found, "it is told")
    assert found == ["process 1 has ended"]
    ends[2] = 137
    waiting.until(lambda: len(found) > 1, "it is told of the other world")
    assert found[1:] == ["process 2 has ended"]
    watch.stop()


@pytest.mark.parametrize("text", ["", "{}", '{"order": 1, "process": 1, "text": "x"}'])
def test_a_failure_that_cannot_be_read_is_one_too(store, start, text):
    first = start(0, "w")
    store.key_value_set("jaxcomm/failures/w", text)
    (told,) = first.hears()
    assert told.startswith("a process failed first: entry 'jaxcomm/failures/w' of")
    assert f"holds {text!r}" in told


def test_of_two_that_fail_both_keep_their_own_and_the_rest_hear_of_the_first(
    store, start
):
    # They look into the store once, before anything failed.
    failed = [start(index, "w", interval=1000) for index in range(2)]
    waiting.until(lambda: store.looks == 2, "their looks")
    for index, order in ((1, "the first"), (0, "the second")):
        failed[index].own = order
        tried = store.messages.total()
        waiting.until(lambda tried=tried: store.messages.total() > tried, "it tells")
    third = start(2, "w")
    assert third.hears() == ["process 1 failed first: the first"]
    assert [process.received for process in failed] == [[], []]


@pytest.mark.parametrize("cleared", ["before", "after", "never"])
def test_worlds_made_anew_know_nothing_of_old_failures(store, start, cleared):
    """Whether or not the extension still reports the old one."""
    first, second = start(0, "old"), start(1, "old")
    first.own = "broken"
    second.hears()
    if cleared == "before":
        first.own = second.own = ""
    for process in (first, second):
        process.watch.watch("new")
    looked_again(store)
    assert (first.received, len(second.received)) == ([], 1)
    assert not any(key.endswith("/new") for key in store.all_keys())
    if cleared == "after":
        first.own = second.own = ""
        seen = first.looks
        waiting.until(lambda: first.looks > seen + 1, "it looks at itself")
    # The same text is news where it was gone in between.
    first.own = "broken again" if cleared == "never" else "broken"
    assert second.hears(2)[1] == f"process 0 failed first: {first.own}"


def test_what_failed_is_told_before_the_end(store, start):
    process = start(0, "w", tick=1000)
    process.own = "broken"
    process.watch.stop()
    assert store.has("w")


def test_the_thread_ends_when_it_is_told_to_and_when_the_store_is_gone(store, start):
    stopped = start(0, "w")
    looked_again(store)
    stopped.watch.stop()
    waiting.until(lambda: not stopped.watch.is_running(), "it ends")
    cut_off = start(1, "w", give_up=0.05)
    looked_again(store)
    store.is_gone = True
    waiting.until(lambda: not cut_off.watch.is_running(), "it ends")
    assert cut_off.received == []
    # A world that is made later, with a store that is back, is watched again.
    store.is_gone = False
    cut_off.watch.watch("later")
    looked_again(store)


def test_a_store_that_is_gone_for_a_moment_loses_no_failure(store, start):
    first, second = (start(i, "w", give_up=waiting.HANG_SECONDS) for i in range(2))
    store.is_gone = True
    first.own = "broken"
    looked_again(store)
    store.is_gone = False
    second.hears()
