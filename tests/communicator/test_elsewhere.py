"""Which processes wait for each other in rounds of different sets."""

import pytest
from job_store import JobStore

from jaxcomm.communicator import elsewhere
from jaxcomm.communicator.store import Store

# Processes 8 and 9 of the first set went to the second, which waits for process 1.
HERE = tuple(range(10))
THERE = (1, 8, 9, 20)


@pytest.fixture
def store():
    made = Store(JobStore())
    for process in HERE[:8]:
        elsewhere.enter(made, process, "here/4", HERE, "make A")
    for process in (8, 9):
        elsewhere.enter(made, process, "there/2", THERE, "make B")
    return made


def test_a_process_of_neither_side_finds_the_two_that_wait_for_each_other(store):
    found = elsewhere.find(store, "here/4", 0, HERE, [8])
    assert (found.here, found.there, found.path) == (1, 8, "there/2")
    verdict = found.verdict("here/4", HERE, "make A")
    assert "process 1 is to make A; process 8 is to make B" in verdict["error"]
    assert "with processes [1, 8, 9, 20]" in verdict["error"]
    # The other side says the same of the two rounds.
    other = elsewhere.find(store, "there/2", 9, THERE, [1])
    assert other.verdict("there/2", THERE, "make B")["rounds"] == verdict["rounds"]
    # Of many that are missing some are looked up, in one message.
    before = sum(store.client.messages.values())
    elsewhere.find(store, "here/4", 0, HERE, [2, 3, 4, 5, 6])
    assert sum(store.client.messages.values()) == before + 1


@pytest.mark.parametrize(
    ("path", "everyone"),
    [("there/2", (8, 9, 20)), ("here/3", HERE)],
    ids=["others of which none is in the way", "an older round of the same set"],
)
def test_a_process_that_waits_elsewhere_may_still_come(store, path, everyone):
    for process in (8, 9):
        elsewhere.enter(store, process, path, everyone, "make B")
    assert elsewhere.find(store, "here/4", 0, HERE, [8, 9]) is None


def test_processes_of_whole_hosts_are_few_numbers(store):
    processes = [*range(64), *range(80, 96)]
    elsewhere.enter(store, 0, "hosts/0", processes, "make A")
    assert '"processes": [[0, 64], [80, 96]]' in store.client.entry("jaxcomm/last/0/0")
