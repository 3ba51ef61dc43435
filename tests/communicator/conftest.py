"""The store in which processes that are threads meet, see support/job_store.py."""

import pytest
from job_store import JobStore


@pytest.fixture
def store(monkeypatch):
    made = JobStore()
    made.serve(monkeypatch)
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "60")
    return made
