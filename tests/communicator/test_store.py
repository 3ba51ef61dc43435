"""The key-value store: what is late, and what failed."""

import time

import pytest

from jaxcomm.communicator.store import Store


class Client:
    """Raises one type for all its errors, as that of ``jax.distributed``."""

    def __init__(self, takes=0.0):
        self.takes = takes

    def blocking_key_value_get(self, key, milliseconds):
        time.sleep(min(self.takes, milliseconds / 1000))
        raise RuntimeError("no entry, or no store")


def test_an_entry_that_does_not_come_in_time_is_late():
    assert Store(Client(takes=0.05)).wait("key", 0.05) is None


def test_an_error_before_the_time_is_over_is_raised():
    with pytest.raises(RuntimeError, match="no store"):
        Store(Client()).wait("key", 60.0)
