"""The clocks of hosts, as far as collectives say that they are apart."""

import pytest

from jaxcomm.diagnostics.clocks import corrections
from jaxcomm.diagnostics.merge import merge_files

ALL = range(4)


@pytest.fixture
def found(make_job):
    """Returns ``found(job, hosts, wrong)``: corrections for clocks wrong by so much."""

    def run(job, hosts, wrong):
        job.hosts, job.wrong = hosts, wrong
        merged = merge_files(job.write())
        return corrections(merged.records, merged.groups)

    return run


def test_a_clock_that_contradicts_collectives_is_corrected(job, found):
    job.did(ALL, "all_reduce(float32[4])").did(ALL, "all_reduce(float32[4])")
    # Half a second long, so the correction is within half a second.
    assert found(job, {0: "a", 1: "b"}, {0: 0, 1: 100}) == {"a": 0, "b": -100}
    assert found(job, {0: "a", 1: "b"}, {0: 0, 1: -7}) == {"a": 0, "b": 7}


def test_a_shift_that_is_possible_is_left_alone(job, found):
    job.did(ALL, "all_reduce(float32[4])")
    assert found(job, {0: "a", 1: "b"}, {0: 0, 1: 0.4}) == {"a": 0, "b": 0}


def test_processes_of_one_host_have_one_clock(job, found):
    job.did(ALL, "all_reduce(float32[4])")
    assert found(job, {0: "a", 1: "a"}, {0: 0, 1: 100}) == {"a": 0}


@pytest.mark.parametrize(
    ("collective", "all_wait"),
    [
        ("all_gather", True),
        ("all_to_all", True),
        ("barrier", True),
        ("reduce_scatter", True),
        # A root may be done before others begin. So may who has an empty part, and of
        # a scan, in which nobody waits for later ranks, the first.
        *((name, False) for name in ("broadcast", "gather", "reduce", "scatter")),
        *((name, False) for name in ("permute", "ragged_all_to_all", "scan")),
    ],
)
def test_only_operations_in_which_all_wait_for_all_tell_of_clocks(
    job, found, collective, all_wait
):
    job.did(ALL, f"{collective}(float32[4])")
    wrong = found(job, {0: "a", 1: "b"}, {0: 0, 1: 100})["b"]
    assert wrong == (-100 if all_wait else 0)


@pytest.mark.parametrize("state", ["failed", "started"])
def test_operations_that_did_not_complete_say_nothing(job, found, state):
    job.did(ALL, "all_reduce(float32[4])", state)
    assert found(job, {0: "a", 1: "b"}, {0: 0, 1: 100}) == {"a": 0, "b": 0}


def test_the_correction_is_the_middle_of_what_is_possible(job, found):
    # On b from 1 to 1.5 s, on a from 0 to 0.5 s: they overlap if b's clock is between
    # 0.5 and 1.5 s ahead.
    job.did([0, 1], "all_reduce(float32[4])").did([2, 3], "all_reduce(float32[4])")
    assert found(job, {0: "a", 1: "b"}, {}) == {"a": 0, "b": -1}


def test_the_last_to_come_and_the_first_to_go_of_a_host_count(job, found):
    # On a from 0 to 1.25 s and from 1 to 1.5 s, on b from 2 to 2.5 s: b's clock is
    # between 0.75 and 1.5 s ahead.
    for rank, seconds in ((0, 1.25), (1, 0.5), ([2, 3], 0.5)):
        job.did(rank, "all_reduce(float32[4])", seconds=seconds)
    assert found(job, {0: "a", 1: "b"}, {}) == {"a": 0, "b": -1.125}


def test_hosts_are_joined_by_way_of_others(make_job, found):
    groups = [[1], [0, 1], [1, 2], [0, 2]]
    job = make_job(devices={0: [0], 1: [1], 2: [2]}, groups=groups)
    job.did([0, 1], "all_reduce(int32[])", group=1)
    job.did([0, 1], "all_reduce(int32[])", group=2)
    # What a and c did alone took long, and says less.
    job.did(0, "all_reduce(int32[])", group=3, seconds=10.0)
    job.did(1, "all_reduce(int32[])", group=3, seconds=9.0)
    assert found(job, {0: "a", 1: "b", 2: "c"}, {0: 0, 1: 10, 2: 30}) == {
        "a": 0, "b": -10, "c": -30,
    }  # fmt: skip
