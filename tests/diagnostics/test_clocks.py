"""The clocks of hosts, as far as collectives say that they are apart."""

import pytest

from jaxcomm.diagnostics.clocks import corrections

ALL = "0123"
# Who did what, and how long it took: on host a ranks 0 and 1, on b 2 and 3. Then how
# far b's clock is ahead, and what is added to its times.
CASES = {
    # Half a second long, so the correction is within half a second.
    "a clock that contradicts collectives": ([(ALL, 0.5)] * 2, 100, -100),
    "a clock that is behind": ([(ALL, 0.5)] * 2, -7, 7),
    "a shift that is possible is left alone": ([(ALL, 0.5)], 0.4, 0),
    # On b from 1 to 1.5 s, on a from 0 to 0.5 s: they overlap if b's clock is between
    # 0.5 and 1.5 s ahead.
    "the middle of what is possible": ([("01", 0.5), ("23", 0.5)], 0, -1),
    # On a from 0 to 1.25 s and from 1 to 1.5 s, on b from 2 to 2.5 s: b's clock is
    # between 0.75 and 1.5 s ahead.
    "the last to come and the first to go": (
        [("0", 1.25), ("1", 0.5), ("23", 0.5)],
        *(0, -1.125),
    ),
}


@pytest.fixture
def found():
    """Returns ``found(job, hosts, wrong)``: corrections for clocks wrong by so much."""

    def run(job, wrong, hosts="abc"):
        job.hosts, job.wrong = dict(enumerate(hosts)), dict(enumerate(wrong))
        merged = job.merged()
        return corrections(merged.records, merged.groups)

    return run


@pytest.mark.parametrize(("done", "wrong", "added"), CASES.values(), ids=CASES)
def test_clocks_are_set_as_collectives_say(job, found, done, wrong, added):
    for ranks, seconds in done:
        job.did(ranks, "all_reduce", seconds=seconds)
    assert found(job, (0, wrong)) == {"a": 0, "b": added}


def test_processes_of_one_host_have_one_clock(job, found):
    assert found(job.did(ALL, "all_reduce"), (0, 100), "aa") == {"a": 0}


@pytest.mark.parametrize(
    ("collective", "all_wait"),
    [
        *((name, True) for name in ("all_gather", "all_to_all", "barrier")),
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
    wrong = found(job.did(ALL, collective), (0, 100))["b"]
    assert wrong == (-100 if all_wait else 0)


@pytest.mark.parametrize("state", ["failed", "started"])
def test_operations_that_did_not_complete_say_nothing(job, found, state):
    job.did(ALL, "all_reduce", state)
    assert found(job, (0, 100)) == {"a": 0, "b": 0}


def test_hosts_are_joined_by_way_of_others(make_job, found):
    groups = [[1], [0, 1], [1, 2], [0, 2]]
    job = make_job(devices={0: [0], 1: [1], 2: [2]}, groups=groups)
    job.did("01", "all_reduce", group=1).did("01", "all_reduce", group=2)
    # What a and c did alone took long, and says less.
    job.did(0, "all_reduce", group=3, seconds=10.0)
    job.did(1, "all_reduce", group=3, seconds=9.0)
    assert found(job, (0, 10, 30)) == {"a": 0, "b": -10, "c": -30}
