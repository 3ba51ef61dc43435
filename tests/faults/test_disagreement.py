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
jaxcomm.init(mesh)
timeout = {waiting.HANG_SECONDS} if index == 1 else {waiting.EXPIRES_SECONDS}
jaxcomm.init(mesh, lanes="hasty", timeout=timeout)
probe = jitted(lambda x: jaxcomm.psum(x, "i"), mesh)
x = spread(mesh, 5)
hasty = jitted(lambda x: jaxcomm.psum(x, "i", lane="hasty"), mesh).lower(x).compile()
answer = values(probe(x))
"""
X = "float32[1,5]"


@pytest.fixture(scope="module")
def processes(start_for_module):
    made = start_for_module(3)
    made.ask(SET_UP)
    return made


@pytest.fixture(autouse=True)
def all_go_on(processes):
    """After each of these the same communicator serves the next program."""
    yield
    assert processes.ask("answer = [values(probe(x)), in_flight()]") == [[[3.0], 0]] * 3
    until_right_in_haste(processes)


def in_turn(processes, program, absent=()):
    """Returns what came of a program that each enters when those before it wait."""
    others = [i for i in (2, 1) if i not in absent]
    for index in others:
        processes[index].ask(f"begin(lambda: values({program}(x)))")
    (first,) = processes.ask(f"answer = attempt(lambda: values({program}(x)))", [0])
    return [first, *processes.ask("answer = outcome()", sorted(others))]


def until_right_in_haste(processes):
    """Run it until nobody is so slow that another times out."""

    def are_right():
        outcomes = in_turn(processes, "hasty")
        told = str(outcomes)
        assert "error" not in told or "DEADLINE_EXCEEDED" in told, outcomes
        return outcomes == [{"value": [3.0]}] * 3

    waiting.until(are_right)


def test_a_rank_that_is_late_is_named_and_is_told_when_it_comes(processes):
    until_right_in_haste(processes)
    outcomes = in_turn(processes, "hasty", absent=[2])
    outcomes += processes.ask("answer = attempt(lambda: values(hasty(x)))", [2])
    for outcome in outcomes:
        text = outcome["text"]
        assert "DEADLINE_EXCEEDED" in text
        assert f"psum({X}) over axes ('i',) (lane 'hasty', operation " in text
        assert "of 3 (cpu:" in text
        seconds = float(re.search(r"waited ([\d.]+) s for rank 2", text)[1])
        assert seconds >= waiting.EXPIRES_SECONDS
        # Where it was last, as all count: one operation before.
        waited, *_, last = map(int, re.findall(r"operation (\d+)", text))
        assert last == waited - 1
        assert (
            f"Process 2 was last in psum({X}) over axes ('i',), operation {last}."
            in text
        )
        assert "JAXCOMM_TIMEOUT" in text
    # It does not wait for those that have stopped waiting for it.
    assert "came when the others had stopped waiting: " in outcomes[2]["text"]


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
