"""``JAXCOMM_CHECK=1``: ranks compare what they call."""

import pytest

from jaxcomm import config

pytestmark = pytest.mark.multiprocess

CALLS = """
mesh = mesh_of()
x = spread(mesh, 3)
psum = jitted(lambda x: jaxcomm.psum(x, "i"), mesh)
gather = jitted(lambda x: jaxcomm.all_gather(x, "i"), mesh)
answer = values(psum(x))
"""


def test_processes_that_call_different_things_all_hear_who_is_odd(start):
    processes = start(2, timeout=60, JAXCOMM_CHECK="1")
    assert processes.ask(CALLS)
    for process, call in zip(processes, ("gather", "psum"), strict=True):
        process.tell(f"answer = attempt(lambda: values({call}(x)))")
    for process in processes:
        text = process.hear()["text"]
        assert "JAXCOMM_CHECK: ranks disagree: rank 1 calls psum(" in text
        assert "where rank 0 calls all_gather(" in text


def test_processes_that_do_not_all_check_are_told(start):
    processes = start(2, timeout=60)
    processes[1].ask("import os; os.environ['JAXCOMM_CHECK'] = '1'")
    for outcome in processes.ask("answer = attempt(lambda: jaxcomm.init(mesh_of()))"):
        assert outcome.get("error") == "CommunicatorError", outcome
        assert "checked" in outcome["text"]


def test_another_value_is_refused(monkeypatch):
    monkeypatch.setenv("JAXCOMM_CHECK", "yes")
    with pytest.raises(ValueError, match="JAXCOMM_CHECK must be 0 or 1, got 'yes'"):
        config.check()
