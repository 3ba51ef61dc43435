"""C6: processes that do not do the same get an error with both calls, and no hang.

Three processes share one set: processes 0 and 1 agree, process 2 does not.
"""

import re

import pytest

pytestmark = pytest.mark.multiprocess

TIMEOUT = 2.0
# What a loaded machine may add, compilation included.
SLACK = 10.0

SET_UP = """
mesh = mesh_of()
probe = jitted(lambda x: jaxcomm.psum(x, "i"), mesh)
x = spread(mesh, 5)
answer = values(probe(x))
"""
X = "float32[1,5]"


@pytest.fixture(scope="module")
def processes(start_for_module):
    made = start_for_module(3, timeout=TIMEOUT)
    made.ask(SET_UP)
    return made


@pytest.fixture(autouse=True)
def all_go_on(processes):
    """After each of these the same communicator serves the next program."""
    yield
    assert processes.ask("answer = [values(probe(x)), in_flight()]") == [[[3.0], 0]] * 3


def test_a_rank_that_sleeps_is_named_and_is_told_when_it_comes(processes):
    outcomes = processes.ask(
        f"""
once = jitted(lambda x: jaxcomm.psum(x, "i"), mesh)
values(once(x))
time.sleep({TIMEOUT} + 1 if index == 2 else 0)
answer = attempt(lambda: values(once(x)))
"""
    )
    for outcome in outcomes:
        text = outcome["text"]
        assert "DEADLINE_EXCEEDED" in text
        assert f"psum({X}) over axes ('i',) (lane 'default', operation " in text
        assert "of 3 (cpu:" in text
        assert f"waited {TIMEOUT:g} s for rank 2" in text
        # Where it was last, as all count: one operation before.
        waited, *_, last = map(int, re.findall(r"operation (\d+)", text))
        assert last == waited - 1
        assert (
            f"Process 2 was last in psum({X}) over axes ('i',), operation {last}."
            in text
        )
        assert "JAXCOMM_TIMEOUT" in text
    early, late = outcomes[:2], outcomes[2]
    for outcome in early:
        assert TIMEOUT - 0.1 < outcome["end"] - outcome["begin"] < TIMEOUT + SLACK
    # It does not wait for those that have stopped waiting for it.
    assert late["end"] - late["begin"] < TIMEOUT / 2


def test_a_rank_that_is_in_time_spoils_nothing(processes):
    assert (
        processes.ask("time.sleep(0.5 if index == 2 else 0)\nanswer = values(probe(x))")
        == [[3.0]] * 3
    )


OURS = "jaxcomm.psum(x, 'i')"
BRANCHES = "jax.lax.cond(jax.lax.axis_index('i') < 2, {}, {}, x)"

# What processes 0 and 1 call and what process 2 calls, and how the messages name it.
MISMATCHES = {
    "operation": (OURS, "jaxcomm.pmax(x, 'i')", f"psum({X})", f"pmax({X})"),
    "family": (OURS, "jaxcomm.ring_shift(x, 'i')", f"psum({X})", f"ring_shift({X})"),
    "dtype": (
        OURS,
        "jaxcomm.psum(x.astype(np.int32), 'i').astype(np.float32)",
        f"psum({X})",
        "psum(int32[1,5])",
    ),
    "size": (
        OURS,
        "jaxcomm.psum(x[:, :3], 'i')[:, [0, 1, 2, 0, 1]]",
        f"psum({X})",
        "psum(float32[1,3])",
    ),
    "size of large ones": (
        "jaxcomm.psum(jax.numpy.tile(x, 20_000), 'i')[:, :5]",
        "jaxcomm.psum(jax.numpy.tile(x, 30_000), 'i')[:, :5]",
        "psum(float32[1,100000])",
        "psum(float32[1,150000])",
    ),
    "order": (
        "jaxcomm.pmax(jaxcomm.psum(x, 'i'), 'i')",
        "jaxcomm.psum(jaxcomm.pmax(x, 'i'), 'i')",
        f"psum({X})",
        f"pmax({X})",
    ),
    "branch": (
        BRANCHES.format(f"lambda x: {OURS}", "lambda x: jaxcomm.all_gather(x, 'i')[1]"),
        BRANCHES.format(f"lambda x: {OURS}", "lambda x: jaxcomm.all_gather(x, 'i')[1]"),
        f"psum({X})",
        f"all_gather({X})",
    ),
    "branch of the same name": (
        BRANCHES.format(f"lambda x: {OURS}", "lambda x: jaxcomm.psum(x * 2, 'i')"),
        BRANCHES.format(f"lambda x: {OURS}", "lambda x: jaxcomm.psum(x * 2, 'i')"),
        f"psum({X})",
        f"psum({X})",
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
        text = outcome["text"]
        assert "over axes ('i',)" in text
        assert ours in text
        assert theirs in text
        assert outcome["end"] - outcome["begin"] < TIMEOUT + SLACK


def test_different_permutations_are_an_error_on_all(processes):
    """Rank 1 hears from rank 0, which wants it to, and may go on to the next one."""
    outcomes = processes.ask(
        """
pairs = [(0, 1), (1, 2), (2, 0)] if index < 2 else [(0, 2), (2, 1), (1, 0)]
program = jitted(lambda x: jaxcomm.ppermute(x, "i", pairs), mesh)
answer = attempt(lambda: values(program(x)))
"""
    )
    texts = [outcome.get("text") for outcome in outcomes]
    for text in (texts[0], texts[2]):
        # As the operation has them: for each rank, from whom.
        assert f"ppermute({X}) with parameters [2, 0, 1]" in text
        assert f"ppermute({X}) with parameters [1, 2, 0]" in text
        assert "over axes ('i',)" in text
    next_ones = processes.ask("answer = attempt(lambda: values(probe(x)))")
    if texts[1] is None:
        assert outcomes[1]["value"] == [0.0]
        for outcome in next_ones:
            assert f"ppermute({X}) with parameters [1, 2, 0]" in outcome["text"]
    else:
        assert "ppermute" in texts[1]
        assert [outcome["value"] for outcome in next_ones] == [[3.0]] * 3


def test_a_rank_that_only_sends_hears_of_a_mismatch_in_what_it_calls_next(processes):
    processes.ask("send = jitted(lambda x: jaxcomm.ppermute(x, 'i', [(0, 1)]), mesh)")
    (outcome,) = processes.ask("answer = attempt(lambda: values(send(x)))", [0])
    assert outcome["value"] == [0.0]
    others = processes.ask(
        "total = jitted(lambda x: jaxcomm.pmax(x, 'i'), mesh)\n"
        "answer = attempt(lambda: values(total(x)))",
        [1, 2],
    )
    for outcome in others:
        assert f"pmax({X})" in outcome["text"]
    for outcome in processes.ask("answer = attempt(lambda: values(probe(x)))"):
        text = outcome["text"]
        assert f"psum({X}) over axes ('i',)" in text
        assert "an operation that had ended in process 0 failed in others" in text
        assert f"called pmax({X})" in text
        assert f"the ranks before it called ppermute({X})" in text


def test_programs_in_another_order_are_an_error_on_all(processes):
    outcomes = processes.ask(
        """
programs = [jitted(lambda x: jaxcomm.psum(x, "i"), mesh),
            jitted(lambda x: jaxcomm.pmin(x, "i"), mesh)]
answer = attempt(lambda: [values(p(x)) for p in programs[:: 1 if index < 2 else -1]])
"""
    )
    for outcome in outcomes:
        assert f"psum({X})" in outcome["text"]
        assert f"pmin({X})" in outcome["text"]


def test_a_branch_without_a_collective_leaves_the_others_waiting_to_the_deadline(
    processes,
):
    """Process 2 has called once less: only a new start evens that out."""
    outcomes = processes.ask(
        f"""
program = jitted(lambda x: {BRANCHES.format(f"lambda x: {OURS}", "lambda x: x")}, mesh)
answer = attempt(lambda: values(program(x)))
"""
    )
    assert outcomes[2]["value"] == [2.0]
    for outcome in outcomes[:2]:
        assert f"psum({X})" in outcome["text"]
        assert "for rank 2" in outcome["text"]
    processes.ask("jaxcomm.finalize(); jaxcomm.init(mesh)")


def test_a_call_that_others_did_not_make_is_forgotten_by_finalize(processes):
    processes.ask(
        "again = jitted(lambda x: jaxcomm.psum(x, 'i'), mesh)\nvalues(again(x))"
    )
    (outcome,) = processes.ask("answer = attempt(lambda: values(again(x)))", [0])
    assert "for ranks 1, 2" in outcome["text"]
    processes.ask("jaxcomm.finalize(); jaxcomm.init(mesh)")
    assert [
        outcome.get("value", outcome.get("text"))
        for outcome in processes.ask("answer = attempt(lambda: values(again(x)))")
    ] == [[3.0]] * 3
