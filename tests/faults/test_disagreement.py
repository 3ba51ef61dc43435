"""C6: processes that do not do the same get an error with both calls, and no hang.

Three processes share one set: processes 0 and 1 agree, process 2 does not.
"""

import pathlib
import re

import pytest
import waiting

pytestmark = pytest.mark.multiprocess

# How long a process must have stood still before it is told.
GRACE_SECONDS = 0.2
# Half of it, so that a deadlock is told after six.
LOOKS = 15

# In the lane "hasty" a wait times out in process 0, which tells process 1, and in
# process 2.
SET_UP = f"""
import functools
from jaxcomm import _ffi

_ffi.process_set = functools.partial(_ffi.process_set, grace_seconds={GRACE_SECONDS})
mesh = mesh_of()
timeout = {waiting.HANG_SECONDS} if index == 1 else {waiting.EXPIRES_SECONDS}


def agree():
    jaxcomm.finalize()
    jaxcomm.init(mesh)
    jaxcomm.init(mesh, lanes="hasty", timeout=timeout)
    return [values(probe(x)), in_flight()]


jaxcomm.init(mesh, lanes=("default", "hasty"))
probe = jitted(lambda x: jaxcomm.psum(x, "i"), mesh)
second = jitted(lambda x: jaxcomm.pmax(x, "i"), mesh)
x, y = spread(mesh, 5), spread(mesh, 7)
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


@pytest.fixture
def disagreeing(processes):
    """All are refused until they agree anew.

    A rank that has failed is a step behind: whoever went on would add two steps.
    """
    yield processes
    for step in range(3):
        ask = f"answer = attempt(lambda: values({('probe', 'hasty')[step % 2]}(x)))"
        for outcome in processes.ask(ask):
            assert "FAILED_PRECONDITION" in outcome["text"]
            assert (
                "refused, since a collective has failed in process" in outcome["text"]
            )
    assert processes.ask("answer = agree()") == [AGREED] * 3


def test_a_rank_that_is_late_is_named_and_is_told_when_it_comes(disagreeing):
    for other in (1, 0):
        disagreeing[other].ask("begin(lambda: values(hasty(x)))")
    outcomes = disagreeing.ask("answer = outcome()", [0, 1])
    outcomes += disagreeing.ask("answer = attempt(lambda: values(hasty(x)))", [2])
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
def test_a_mismatch_is_an_error_on_all_with_both_calls(disagreeing, kind):
    first, second, ours, theirs = MISMATCHES[kind]
    outcomes = disagreeing.ask(
        f"""
call = eval("lambda x: " + ({first!r} if index < 2 else {second!r}))
program = jitted(call, mesh)
answer = attempt(lambda: values(program(x)))
"""
    )
    for outcome in outcomes:
        for text in ("over axes ('i',)", ours, theirs):
            assert text in outcome["text"]


def test_programs_with_other_numbers_of_collectives_end_once_all_stand_still(
    disagreeing,
):
    """Long before the timeout: each waits for what another one will never do."""
    first, second = "jaxcomm.psum(x, 'i')", "jaxcomm.pmin(jaxcomm.pmax(x, 'i'), 'i')"
    outcomes = disagreeing.ask(
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


# What the main thread of process 2 does before it comes to where the others wait, while
# another thread waits where they come later.
LEGAL = {
    "computes": "while not released(): pass",
    "waits for a loader that sleeps": """
loaded = queue.Queue()
def load():
    waiting.until(released)
    loaded.put(1)
threading.Thread(target=load).start()
loaded.get()
""",
    "waits for a callback of a program": """
def called(y):
    waiting.until(released)
    return y
jax.jit(lambda y: jax.pure_callback(called, y, y))(1.0).block_until_ready()
""",
}


def looks(process):
    """How often the thread that tells has woken up, to look or to move bytes."""
    for task in pathlib.Path(f"/proc/{process.pid}/task").iterdir():
        if (task / "comm").read_text() == "jaxcomm-arena\n":
            return int(
                re.search(r"\nvol\w+:\s+(\d+)", (task / "status").read_text())[1]
            )
    raise AssertionError("no such thread")


@pytest.mark.parametrize("kind", LEGAL)
def test_who_may_still_come_is_waited_for(processes, kind, tmp_path):
    release = tmp_path / "release"
    for index in (0, 1):
        processes[index].tell("answer = [values(probe(x)), values(second(y))]")
    processes[2].tell(
        f"""
import os, queue, threading
released = lambda: os.path.exists({str(release)!r})
begin(lambda: values(second(y)))
{LEGAL[kind]}
answer = [values(probe(x)), outcome()["value"]]
"""
    )
    before = [looks(process) for process in processes]
    waiting.until(
        lambda: all(
            process.unheard() or looks(process) >= count + LOOKS
            for process, count in zip(processes, before, strict=True)
        )
    )
    release.touch()
    for process in processes:
        assert process.hear() == [[3.0], [2.0]]
