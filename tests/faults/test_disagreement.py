"""C6: processes that do not do the same get an error with both calls, and no hang.

Three processes share one set: processes 0 and 1 agree, process 2 does not.
"""

import re

import pytest
import waiting

pytestmark = pytest.mark.multiprocess

# In the lane "hasty" a wait times out in process 0, which tells process 1, and in
# process 2.
SET_UP = f"""
mesh = mesh_of()
timeout = {waiting.HANG_SECONDS} if index == 1 else {waiting.EXPIRES_SECONDS}


def agree():
    jaxcomm.finalize()
    jaxcomm.init(mesh)
    jaxcomm.init(mesh, lanes="hasty", timeout=timeout)
    return [values(probe(x)), in_flight()]


jaxcomm.init(mesh, lanes=("default", "hasty"))
probe = jitted(lambda x: jaxcomm.psum(x, "i"), mesh)
x = spread(mesh, 5)
hasty = jitted(lambda x: jaxcomm.psum(x, "i", lane="hasty"), mesh).lower(x).compile()
answer = agree()
"""
X = "float32[1,5]"
AGREED = [[3.0], 0]


@pytest.fixture(scope="module")
def processes(start_for_module):
    made = start_for_module(3)
    assert made.ask(SET_UP) == [AGREED] * 3
    return made


@pytest.fixture(autouse=True)
def all_are_refused_until_they_agree_anew(processes):
    """A rank that has failed is a step behind: whoever went on would add two steps."""
    yield
    for step in range(3):
        ask = f"answer = attempt(lambda: values({('probe', 'hasty')[step % 2]}(x)))"
        for outcome in processes.ask(ask):
            assert "FAILED_PRECONDITION" in outcome["text"]
            assert (
                "refused, since a collective has failed in process" in outcome["text"]
            )
    assert processes.ask("answer = agree()") == [AGREED] * 3


def test_a_rank_that_is_late_is_named_and_is_told_when_it_comes(processes):
    for other in (1, 0):
        processes[other].ask("begin(lambda: values(hasty(x)))")
    outcomes = processes.ask("answer = outcome()", [0, 1])
    outcomes += processes.ask("answer = attempt(lambda: values(hasty(x)))", [2])
    for outcome in outcomes:
        text = outcome["text"]
        assert f"psum({X}) over axes ('i',) (lane 'hasty', operation 1): " in text
        assert "of 3 (cpu:" in text
        seconds = float(re.search(r"waited ([\d.]+) s for rank 2", text)[1])
        assert seconds >= waiting.EXPIRES_SECONDS
        assert f"Process 2 was last in psum({X}) over axes ('i',), operation 1." in text
        assert "JAXCOMM_TIMEOUT" in text
    assert "DEADLINE_EXCEEDED" in outcomes[0]["text"]
    # It does not wait for those that have stopped waiting for it.
    assert "The first failure: psum(" in outcomes[2]["text"]


# What processes 0 and 1 call and what process 2 calls, and how the messages name it.
MISMATCHES = {
    "operation": (
        "jaxcomm.psum(x, 'i')",
        "jaxcomm.pmax(x, 'i')",
        f"psum({X})",
        f"pmax({X})",
    ),
    "size of large ones": (
        "jaxcomm.psum(jax.numpy.tile(x, 20_000), 'i')[:, :5]",
        "jaxcomm.psum(jax.numpy.tile(x, 30_000), 'i')[:, :5]",
        "psum(float32[1,100000])",
        "psum(float32[1,150000])",
    ),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_a_mismatch_is_an_error_on_all_with_both_calls(processes, kind):
    first, second, ours, theirs = MISMATCHES[kind]
    outcomes = processes.ask(
        f"""
call = eval("lambda x: " + ({first!r} if index < 2 else {second!r}))
program = jitted(call, mesh)
answer = attempt(lambda: values(program(x)))
"""
    )
    for outcome in outcomes:
        for text in ("over axes ('i',)", ours, theirs):
            assert text in outcome["text"]


def test_programs_with_other_numbers_of_collectives_end_once_all_stand_still(processes):
    """Long before the timeout: each waits for what another one will never do."""
    first, second = "jaxcomm.psum(x, 'i')", "jaxcomm.pmin(jaxcomm.pmax(x, 'i'), 'i')"
    outcomes = processes.ask(
        f"""
call = eval("lambda x: " + ({first!r} if index < 2 else {second!r}))
program = jitted(call, mesh)
answer = attempt(lambda: values(program(x)))
"""
    )
    for outcome in outcomes:
        text = outcome["text"]
        assert f"psum({X}) over axes ('i',) (lane 'default', operation 2): " in text
        assert " for rank 2. Process 2 waits in pmax(" in text
        assert "instead. Each waits there for another one" in text
