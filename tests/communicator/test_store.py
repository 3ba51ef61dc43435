"""The key-value store: what is late, and what failed."""

import pytest
import waiting
from job_store import JobStore

from jaxcomm.communicator import store as product
from jaxcomm.communicator.store import Store
from jaxcomm.errors import CommunicatorError


@pytest.fixture
def wait(monkeypatch):
    """Gives ``wait(takes, text)``: a wait of a minute, answered after some time."""
    clock = waiting.Clock()
    monkeypatch.setattr(product, "time", clock)

    class Client:
        # Of jax.distributed. It has one type of error.
        def blocking_key_value_get(self, key, milliseconds):
            clock.advance(min(takes, milliseconds / 1000))
            if text is None:
                raise RuntimeError("no entry, or no store")
            return text

    def run(seconds, answer=None):
        nonlocal takes, text
        takes, text = seconds, answer
        return Store(Client()).wait("key", 60)

    takes = text = None
    return run


def test_an_entry_that_does_not_come_is_late_unless_the_store_is_gone_before(wait):
    assert wait(60) is None
    with pytest.raises(RuntimeError, match="no store"):
        wait(30)
    # What comes late and is nothing of ours is named, and not taken for missing.
    with pytest.raises(CommunicatorError, match=r"holds '\{\}'"):
        wait(60, "{}")


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


def test_a_name_that_is_no_process_or_another_key_s_entry_is_named():
    store = Store(JobStore())
    store.set("folder/1", "right", 1)
    assert store.entries("folder") == {1: "right"}
    store.client.key_value_set("b/1", store.client.entry("folder/1"))
    with pytest.raises(CommunicatorError, match="entry 'b/1' of"):
        store.get("b/1")
    store.set("folder/one", "wrong", 1)
    with pytest.raises(CommunicatorError, match="entry 'folder/one' of"):
        store.entries("folder")
