"""Which failures a job starts again after, and on which slots."""

import pytest

from jaxcomm.launch.job import Outcome
from jaxcomm.launch.options import Options
from jaxcomm.launch.restarts import Restarts

DONE = Outcome(0)
CRASH = Outcome(137, failed=1, was_up=True)
CRASH_AT_START = Outcome(137, failed=1)
ENDS_AT_START = Outcome(1, failed=3)
KILLED = "process 1 was ended by SIGKILL"
ALL = (0, 1, 2, 3)


def job(most=3, **given):
    return Restarts(Options(processes=4, script="x", max_restarts=most, **given))


@pytest.mark.parametrize(
    ("most", "outcomes", "said"),
    [
        (2, [CRASH], f"restart 1 of 2: {KILLED}"),
        (2, [CRASH, Outcome(3, failed=0, was_up=True)],
         "restart 2 of 2: process 0 ended with status 3"),
        (2, [CRASH] * 3, f"not restarted: {KILLED}, after all 2 restarts"),
        # One that dies at the start each time ends too.
        (5, [CRASH_AT_START] * 5, f"restart 5 of 5: {KILLED}"),
        (5, [CRASH_AT_START] * 6, f"not restarted: {KILLED}, after all 5 restarts"),
        (3, [CRASH, DONE], "done after 1 restart"),
        (3, [CRASH, CRASH, DONE], "done after 2 restarts"),
        # Nothing is said where no restart is expected.
        (3, [DONE], ""),
        (0, [CRASH], ""),
        (3, [Outcome(143, failed=1, was_asked=True, was_up=True)], ""),
        (3, [Outcome(124, was_asked=True)], ""),
        # Wrong arguments stay wrong, and a bug at the first start a bug.
        (3, [CRASH, Outcome(2, failed=0, was_up=True)],
         "not restarted: process 0 ended with status 2, which says that the program "
         "was called wrongly. Correct the call"),
        (3, [ENDS_AT_START],
         "not restarted: process 3 ended with status 1 before all processes had "
         "started their devices, in the first attempt. It would do so again: correct "
         "the program"),
        # A later start may fail by what the failure left.
        (3, [CRASH, ENDS_AT_START], "restart 2 of 3: process 3 ended with status 1"),
        (3, [CRASH_AT_START, ENDS_AT_START],
         "restart 2 of 3: process 3 ended with status 1"),
    ],
)  # fmt: skip
def test_it_says_what_it_does(most, outcomes, said):
    restarts = job(most)
    for outcome in outcomes[:-1]:
        assert restarts.after(outcome)
    last = restarts.attempt
    assert last.restarts == len(outcomes) - 1
    assert restarts.after(outcomes[-1]) == said
    assert restarts.attempt.restarts == last.restarts + said.startswith("restart")
    assert said.startswith("restart") or restarts.attempt is last


def test_a_slot_that_fails_twice_at_the_start_is_left_out():
    restarts = job(most=9, min_processes=2)
    run_id = restarts.attempt.run_id
    # Process 1 runs on slot 2 in the end. Fewer than two are not enough.
    for outcome, slots in [
        (CRASH, ALL),
        *zip([CRASH_AT_START] * 6, [ALL, *[(0, 2, 3)] * 2, *[(0, 3)] * 3], strict=True),
    ]:
        said = restarts.after(outcome)
        assert restarts.attempt.slots == slots
        assert ("and is left out" in said) == (restarts.attempt.restarts in (3, 5))
        assert restarts.attempt.restarts != 3 or said == (
            f"restart 3 of 9: {KILLED}. Slot 1 failed 2 times at the start and is left "
            "out: 3 of 4 processes go on"
        )
    assert restarts.attempt.run_id == run_id


@pytest.mark.parametrize(
    ("least", "outcomes"),
    [(1, [CRASH_AT_START, CRASH] * 3), (None, [CRASH_AT_START] * 5)],
    ids=["the job was up in between", "nobody asked for it"],
)
def test_no_slot_is_left_out_otherwise(least, outcomes):
    restarts = job(most=9, min_processes=least)
    for outcome in outcomes:
        restarts.after(outcome)
    assert restarts.attempt.slots == ALL
