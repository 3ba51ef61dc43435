"""Which failures a job starts again after, and on which slots."""

import pytest

from jaxcomm.launch.job import Outcome
from jaxcomm.launch.options import Options
from jaxcomm.launch.restarts import Restarts

KILLED = 137
CRASH = Outcome(KILLED, failed=1, was_up=True)
CRASH_AT_START = Outcome(KILLED, failed=1)


@pytest.fixture
def restarts():
    """Returns a function that makes the restarts of a job of four processes."""

    def make(most=3, **given):
        asked = Options(processes=4, script="x", max_restarts=most, **given)
        return Restarts(asked)

    return make


def slots(found):
    return found.attempt.slots


def test_each_failure_is_counted_with_its_reason(restarts):
    job = restarts(most=2)
    assert job.after(CRASH) == "restart 1 of 2: process 1 was ended by SIGKILL"
    assert job.attempt.restarts == 1
    failed = Outcome(3, failed=0, was_up=True)
    assert job.after(failed) == "restart 2 of 2: process 0 ended with status 3"
    assert job.attempt.restarts == 2
    last = job.attempt
    assert job.after(CRASH) == (
        "not restarted: process 1 was ended by SIGKILL, after all 2 restarts"
    )
    assert job.attempt is last


def test_a_job_that_dies_at_the_start_each_time_ends_too(restarts):
    job = restarts(most=5)
    for number in range(1, 6):
        assert job.after(CRASH_AT_START).startswith(f"restart {number} of 5: ")
    assert job.after(CRASH_AT_START).startswith("not restarted: ")


@pytest.mark.parametrize("count", [1, 2])
def test_an_end_without_failure_names_the_restarts(restarts, count):
    job = restarts()
    for _ in range(count):
        job.after(CRASH)
    last = job.attempt
    assert job.after(Outcome(0)) == f"done after {count} restart{'s'[: count - 1]}"
    assert job.attempt is last


@pytest.mark.parametrize(
    ("most", "outcome"),
    [
        (3, Outcome(0)),
        (0, CRASH),
        (3, Outcome(143, failed=1, was_asked=True, was_up=True)),
        (3, Outcome(124, was_asked=True)),
    ],
)
def test_nothing_is_said_where_no_restart_is_expected(restarts, most, outcome):
    job = restarts(most)
    first = job.attempt
    assert job.after(outcome) == ""
    assert job.attempt is first


def test_wrong_arguments_stay_wrong(restarts):
    job = restarts()
    assert job.after(CRASH).startswith("restart 1")
    second = job.attempt
    assert job.after(Outcome(2, failed=0, was_up=True)) == (
        "not restarted: process 0 ended with status 2, which says that the program was "
        "called wrongly. Correct the call"
    )
    assert job.attempt is second


def test_a_program_that_ends_by_itself_at_its_first_start_has_a_bug(restarts):
    job = restarts()
    first = job.attempt
    assert job.after(Outcome(1, failed=3)) == (
        "not restarted: process 3 ended with status 1 before all processes had started "
        "their devices, in the first attempt. It would do so again: correct the program"
    )
    assert job.attempt is first


def test_a_later_start_may_fail_by_what_the_failure_left(restarts):
    for before in (CRASH, CRASH_AT_START):
        job = restarts()
        job.after(before)
        assert job.after(Outcome(1, failed=3)).startswith("restart 2 of 3: ")


def test_a_slot_that_fails_twice_at_the_start_is_left_out(restarts):
    job = restarts(most=9, min_processes=2)
    run_id = job.attempt.run_id
    job.after(CRASH)
    assert slots(job) == (0, 1, 2, 3)
    job.after(CRASH_AT_START)
    assert slots(job) == (0, 1, 2, 3)
    assert job.after(CRASH_AT_START) == (
        "restart 3 of 9: process 1 was ended by SIGKILL. Slot 1 failed 2 times at the "
        "start and is left out: 3 of 4 processes go on"
    )
    assert slots(job) == (0, 2, 3)
    # Process 1 runs on slot 2 now.
    job.after(CRASH_AT_START)
    job.after(CRASH_AT_START)
    assert slots(job) == (0, 3)
    # Fewer are not enough.
    job.after(CRASH_AT_START)
    job.after(CRASH_AT_START)
    assert slots(job) == (0, 3)
    assert job.attempt.run_id == run_id


def test_failures_at_the_start_count_from_when_the_job_was_up(restarts):
    job = restarts(most=9, min_processes=1)
    for outcome in (CRASH_AT_START, CRASH) * 3:
        job.after(outcome)
    assert slots(job) == (0, 1, 2, 3)


def test_no_slot_is_left_out_unless_asked_for(restarts):
    job = restarts(most=9)
    for _ in range(5):
        job.after(CRASH_AT_START)
    assert slots(job) == (0, 1, 2, 3)
