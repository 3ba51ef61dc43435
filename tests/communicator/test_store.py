"""The key-value store: what is late, and what failed."""

import pytest
import waiting
from job_store import JobStore

from jaxcomm.communicator import store as product
from jaxcomm.communicator.store import Store
from jaxcomm.errors import CommunicatorError


class Client:
    """Answers after some time. It has one type of error, as ``jax.distributed``."""

    def __init__(self, clock, takes, text=None):
        self.clock, self.takes, self.text = clock, takes, text

    def blocking_key_value_get(self, key, milliseconds):
        self.clock.advance(min(self.takes, milliseconds / 1000))
        if self.text is None:
            raise RuntimeError("no entry, or no store")
        return self.text


@pytest.fixture
def clock(monkeypatch):
    made = waiting.Clock()
    monkeypatch.setattr(product, "time", made)
    return made


def test_an_entry_that_does_not_come_in_time_is_late(clock):
    assert Store(Client(clock, takes=60)).wait("key", 60) is None


def test_an_error_before_the_time_is_over_is_raised(clock):
    with pytest.raises(RuntimeError, match="no store"):
        Store(Client(clock, takes=30)).wait("key", 60)


def test_what_comes_late_and_is_nothing_of_ours_is_named(clock):
    """And not taken for an entry that did not come."""
    with pytest.raises(CommunicatorError, match=r"holds '\{\}'"):
        Store(Client(clock, takes=60, text="{}")).wait("key", 60)


class Bytes:
    """Has bytes that are no text: the client of ``jax.distributed`` reads texts."""

    def key_value_try_get(self, *_):
        return b"\xff\xfe".decode()

    key_value_dir_get = blocking_key_value_get = key_value_try_get


@pytest.mark.parametrize(
    "read",
    [Store.get, Store.entries, lambda store, key: store.wait(key, 60)],
    ids=["get", "entries", "wait"],
)
def test_bytes_that_are_no_text_are_named(read):
    with pytest.raises(CommunicatorError, match=r"entry 'a/7' .* holds b'\\xff\\xfe'"):
        read(Store(Bytes()), "a/7")


def test_a_name_that_is_no_process_is_named():
    store = Store(JobStore())
    store.set("folder/1", "right", 1)
    assert store.entries("folder") == {1: "right"}
    store.set("folder/one", "wrong", 1)
    with pytest.raises(CommunicatorError, match="entry 'folder/one' of"):
        store.entries("folder")


def test_an_entry_of_another_key_is_not_taken_for_this_one():
    store = Store(JobStore())
    store.set("a/1", "of a", 1)
    store.client.key_value_set("b/1", store.client.entry("a/1"))
    assert store.get("a/1") == "of a"
    with pytest.raises(CommunicatorError, match="entry 'b/1' of"):
        store.get("b/1")
