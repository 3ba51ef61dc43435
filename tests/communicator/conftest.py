"""Processes that are threads, and the store in which they meet."""

import pytest
from job_store import JobStore, Processes

from jaxcomm import compat
from jaxcomm.communicator import phase


@pytest.fixture
def store(monkeypatch):
    made = JobStore()
    monkeypatch.setattr(compat, "key_value_store", lambda: made)
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "60")
    return made


@pytest.fixture
def processes(store):
    return Processes(store)


@pytest.fixture
def patient(monkeypatch):
    """Has no wait end in vain on a busy machine: each of those costs messages."""
    monkeypatch.setattr(phase, "_FIRST_WAIT_SECONDS", 60.0)
    monkeypatch.setattr(phase, "_LAST_WAIT_SECONDS", 60.0)
