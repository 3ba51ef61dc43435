"""Processes that are threads, and the store in which they meet."""

import pytest
from job_store import JobStore, Processes

from jaxcomm import compat


@pytest.fixture
def store(monkeypatch):
    made = JobStore()
    monkeypatch.setattr(compat, "key_value_store", lambda: made)
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "60")
    return made


@pytest.fixture
def processes(store):
    return Processes(store)
