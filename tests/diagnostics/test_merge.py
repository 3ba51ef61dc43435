"""The records of all processes together say who is behind, and at what."""

import json

import pytest

from jaxcomm.diagnostics.files import merge_files
from jaxcomm.diagnostics.record import RecordError

ALL = "0123"
# In texts {2} is "rank 2 (process 1, cpu:2048)".
RANKS = [
    f"rank {rank} (process {rank // 2}, cpu:{device})"
    for rank, device in enumerate((0, 1, 2048, 2049))
]
NEVER = "never used this communicator"
CASES = {
    "the rank that did not come is named with what it did last": (
        [*[(ALL, "psum")] * 41, ("013", "all_gather(float32[8])", "started", "b")],
        "behind (2,): {2} last completed psum(float32[4]) #41; ranks 0, 1, 3 wait in "
        "all_gather(float32[8]) #42",
    ),
    "ranks that gave up are told from those that wait": (
        [(ALL, "psum"), ("01", "psum(int32[])", "failed", "b")],
        "behind (2, 3): {2} and {3} last completed psum(float32[4]) #1; {0} and {1} "
        "gave up in psum(int32[]) #2",
    ),
    "a rank that has done nothing yet": (
        [("012", "psum", "started")],
        "behind (3,): {3} {never}; ranks 0-2 wait in psum(float32[4]) #1",
    ),
    "a pair of a permutation that is done early is not missing": (
        [("01", "ppermute"), ("2", "ppermute", "started")],
        "behind (3,): {3} {never}; {2} waits in ppermute(float32[4]) #1",
    ),
    "one rank with other shapes": (
        [
            *[(ALL, "psum(float32[2])")] * 16,
            ("023", "psum(float32[8])", "failed", "b"),
            ("1", "psum", "failed", "b"),
        ],
        "mismatch (1,): at #17 {1} ran psum(float32[4]) where ranks 0, 2, 3 ran "
        "psum(float32[8])",
    ),
    # As after jax.lax.cond on axis_index: two call sites, each with some of the ranks.
    "ranks that wait for each other in two places": (
        [("012", "psum", "started", "b"), ("3", "all_gather", "started", "c")],
        "mismatch (3,): at #1 {3} ran all_gather(float32[4]) where ranks 0-2 ran "
        "psum(float32[4])",
    ),
    "the same call at another place": (
        [("012", "psum", "started", "b"), ("3", "psum", "started", "c")],
        "mismatch (3,): at #1 {3} ran psum(float32[4]) where ranks 0-2 ran "
        "psum(float32[4]) at another place of the program",
    ),
    "the same call of another launch": (
        [("012", "psum", "started", "a", 7), ("3", "psum", "started", "a", 8)],
        "mismatch (3,): at #1 {3} ran psum(float32[4]) where ranks 0-2 ran "
        "psum(float32[4]) in another launch of a program",
    ),
    # One rank left an earlier program when it failed, and counts less since.
    "the numbers of both are given where they differ": (
        [
            ("012", "psum", "failed"),
            (ALL, "psum", "completed", "a", 2),
            ("012", "psum", "started", "b", 3),
            ("3", "pmax", "started", "c", 3),
        ],
        "mismatch (3,): {3} ran pmax(float32[4]) as #2 where ranks 0-2 ran "
        "psum(float32[4]) as #3",
    ),
    "all have come, and bytes were moving": (
        [("013", "psum", "started"), ("2", "psum", "started")],
        "slow (2,): all ranks came to psum(float32[4]) #1; {2} came last, 1 s after "
        "the first; bytes were moving",
    ),
    "the same call with other parameters": (
        [
            ("012", "ppermute", "failed", "a", 1, "1"),
            ("3", "ppermute", "failed", "a", 1, "2"),
        ],
        "mismatch (3,): at #1 {3} ran ppermute(float32[4]) where ranks 0-2 ran "
        "ppermute(float32[4]) with other parameters or results",
    ),
    # With 90 forgotten no ring remembers the beginning of the run.
    "turns of a loop whose beginning is forgotten": (
        [*[(ALL, "ppermute")] * 100, ("012", "ppermute", "started")],
        "behind (3,): {3} last completed ppermute(float32[4]) #100; ranks 0-2 wait in "
        "ppermute(float32[4]) #101",
        {"forget": 90},
    ),
    # Ranks of NCCL have one order, and those of other processes other run ids of XLA's.
    "operations of NCCL meet by their number": (
        [
            *[("01", "psum", "completed", "a", run) for run in (7, 8, 9)],
            *[("23", "psum", "completed", "a", run) for run in (9, 10, 11)],
            ("01", "psum", "started", "a", 10),
            ("2", "psum", "started", "a", 12),
        ],
        "behind (3,): {3} last completed psum(float32[4]) #3; ranks 0-2 wait in "
        "psum(float32[4]) #4",
        {"backend": "nccl"},
    ),
    "completed operations in another order": (
        [
            *(("01", "psum"), ("01", "pmax(int8[])", "completed", "b")),
            *(("23", "pmax(int8[])", "completed", "b"), ("23", "psum")),
        ],
        None,
    ),
}


def found_in(merged):
    return [f"{each.kind} {each.ranks}: {each.text}" for each in merged.findings]


def text_of(text):
    return text.format(*RANKS, never=NEVER)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_wrong_is_found(make_job, case):
    done, text, *options = case
    job = make_job(**dict(*options))
    for each in done:
        job.did(*each)
    assert found_in(job.merged()) == ([text_of(text)] if text else [])


# Who did what in the same second, and who is blamed.
TIES = {
    "two and two, at once": (
        [[("01", "psum", "started"), ("23", "pmax", "started", "b")]],
        "mismatch (2, 3): at #1 {2} and {3} ran pmax(float32[4]) where {0} and {1} ran "
        "psum(float32[4])",
    ),
    "two and two, rank 0 later": (
        [[("23", "pmax", "started", "b")], [("01", "psum", "started")]],
        "mismatch (0, 1): at #1 {0} and {1} ran psum(float32[4]) where {2} and {3} ran "
        "pmax(float32[4])",
    ),
    "one and one and two": (
        [[("1", "pmin", "started", "c"), ("3", "pmax", "started", "b")],
         [("02", "psum", "started")]],
        "mismatch (1, 3): at #1 {3} ran pmax(float32[4]) where {0} and {2} ran "
        "psum(float32[4]); at #1 {1} ran pmin(float32[4]) where {0} and {2} ran "
        "psum(float32[4])",
    ),
    "two are last": (
        [[("02", "psum", "started")],
         [("1", "psum", "started"), ("3", "psum", "failed")]],
        "slow (1, 3): all ranks came to psum(float32[4]) #1; {1} and {3} came last, "
        "1 s after the first; {3} failed",
    ),
    "nobody is last": (
        [[("0123", "psum", "started")]],
        "slow (): all ranks came to psum(float32[4]) #1; bytes were moving",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TIES.values(), ids=TIES)
def test_whom_a_finding_blames_does_not_depend_on_an_order(job, case):
    seconds, text = case
    for at_once in seconds:
        now = job.time
        for each in at_once:
            job.time = now
            job.did(*each)
    assert found_in(job.merged()) == [text_of(text)]


def test_a_record_of_an_earlier_job_is_told(job):
    job.did(ALL, "psum")
    text = "process 0 wrote its record before process 1 began"
    earlier, late = job.write()
    assert text not in str(merge_files([earlier, late]))
    document = json.loads(late.read_text())
    # Another host has another clock.
    for host, is_told in (("node7", True), ("node8", False)):
        late.write_text(json.dumps(document | {"began": job.time + 1, "host": host}))
        assert (text in str(merge_files([earlier, late]))) == is_told


def test_a_rank_that_went_on_for_long_is_not_behind(job):
    """Records that a running job writes are of different moments."""
    job.did("01", "psum").did("01", "psum", "started", run=2)
    job.forget = 90
    for run in range(1, 100):
        job.did("23", "psum", run=run)
    assert found_in(job.merged()) == [
        text_of(
            "slow (): {0} and {1} wait in psum(float32[4]) #2, and {2} and {3} went on "
            "before their record was written: the records are of different moments"
        )
    ]


def test_failures_that_were_survived_are_no_findings(job):
    assert "No operation was recorded." in str(job.merged())
    job.did(ALL, "psum", "failed", run=1).did(ALL, "psum(int8[])", run=2)
    merged = job.merged()
    assert merged.findings == []
    assert "Nobody waits. 8 operations are on record; 4 failed before" in str(merged)


def test_independent_operations_in_another_order_are_no_mismatch(job):
    # Rank 3 comes to b first; it has not come to c.
    job.did("012", "psum", "started", "c").did("012", "pmax", "started", "b")
    job.did(3, "pmax", "started", "b")
    kinds = {finding.kind: finding.text for finding in job.merged().findings}
    assert set(kinds) == {"behind", "slow"}
    assert kinds["behind"] == text_of(
        "{3} came to pmax(float32[4]) #1 instead; ranks 0-2 wait in psum(float32[4]) #1"
    )


def test_rings_that_forgot_different_parts_of_a_loop_are_compared_where_both_know(job):
    for _ in range(30):
        job.did(ALL, "ppermute", site="loop")
    job.did("01", "ppermute", "started", site="loop")
    paths, first = job.write(), job.document(0)
    (communicator,) = first["communicators"]
    entries = communicator["entries"]
    communicator["entries"] = [each for each in entries if each["sequence"] > 20]
    paths[0].write_text(json.dumps(first))
    (found,) = merge_files(paths).findings
    assert found.text == text_of(
        "{2} and {3} last completed ppermute(float32[4]) #30; {0} and {1} wait in "
        "ppermute(float32[4]) #31"
    )


def test_a_process_without_a_record_is_named(job):
    job.did(ALL, "psum").did("01", "psum", "failed", run=2)
    merged = job.merged(0)
    assert merged.missing == (1,)
    (found,) = merged.findings
    assert found.text.startswith(text_of("{2} and {3} left no record; "))
    document = json.loads(json.dumps(merged.to_json()))
    assert document["missing"] == [1]
    assert document["processes"]["0"]["reason"] == "timeout"
    assert [found["kind"] for found in document["findings"]] == ["behind"]
    assert "flight records of 1 of 2 processes (timeout: 0)" in str(merged)
    assert "no record of process 1: killed, still computing, or" in str(merged)


def test_a_rank_that_waits_in_another_communicator_is_followed_there(job):
    job.did("012", "psum", "started")
    job.did(3, "all_gather(int8[2])", "started", "z", axes="('j',)")
    first, second = job.merged().findings
    assert first.text == text_of(
        "{3} {never}, now in all_gather(int8[2]) #1 of axes ('j',), lane 'default'; "
        "ranks 0-2 wait in psum(float32[4]) #1"
    )
    assert first.title == "axes ('i',), lane 'default'"
    assert second.title == "axes ('j',), lane 'default'"
    assert second.text.count(", now in psum(float32[4]) #1 of axes ('i',)") == 1


def test_files_that_cannot_be_compared_are_refused_by_name(job, make_job):
    paths = job.did(ALL, "psum").write()
    other = make_job(devices={0: [0], 1: [1], 2: [2]}).write(2)
    odd = job.document(1)
    odd["communicators"][0]["groups"] = [[0, 1, 2048, 2049, 5]]
    for files, text in (
        ([], "no flight record was given"),
        (paths[:1] * 2, r"flight-record-0.json and .* both of proce"),
        (paths[:1] + other, r"-2.json is of a job of 3 processes and .*2;"),
        (paths, "disagree on the groups of axes"),
    ):
        if files is paths:
            paths[1].write_text(json.dumps(odd))
        with pytest.raises(RecordError, match=text):
            merge_files(files)


def test_what_a_process_closed_shows_how_far_it_came(make_job):
    """As after a step that one skipped: it is done while others have one more."""
    job = make_job(devices={0: [0], 1: [2048], 2: [4096]})
    job.did("012", "psum").did("012", "psum", run=2).did("02", "psum", "failed", run=3)
    job.closed.add((1, "('i',)"))
    merged = job.merged()
    (finding,) = merged.findings
    assert finding.text == (
        "rank 1 (process 1, cpu:2048) last completed psum(float32[4]) #2, and closed "
        "the communicator; rank 0 (process 0, cpu:0) and rank 2 (process 2, cpu:4096) "
        "gave up in psum(float32[4]) #3"
    )
    assert merged.suspect.startswith(
        "suspect: process 1 (pid 101, host node7): last completed psum #2; processes "
        "0, 2 wait in psum #3 for 0.5 s; "
    )


def test_without_what_some_went_on_from_nobody_is_blamed_for_it_again(make_job):
    """The record of process 2 is older: it was written as the first failure was."""
    job = make_job(devices={0: [0], 1: [2048], 2: [4096], 3: [6144]})
    job.did("0123", "psum").did("023", "psum", "failed", run=2)
    job.did("03", "psum", run=3, axes="('j',)")
    job.closed |= {(process, "('i',)") for process in (0, 3)}
    assert job.merged(0, 2, 3).findings == []


def test_devices_of_several_that_left_no_record_are_told_by_their_order(make_job):
    job = make_job(devices={i: [2 * i, 2 * i + 1] for i in range(4)})
    job.did("01234567", "psum").did("0167", "psum", "failed", run=2)
    silent = (
        "it is not seen to do anything; it left no record: the others tell what it did "
        "last"
    )
    assert job.merged(0, 3).suspect == (
        f"suspect: process 1: last completed psum #1; processes 0, 3 wait in psum #2 "
        f"for 0.5 s; {silent}; equally likely: process 2: last completed psum #1, and "
        f"{silent}"
    )


def test_of_one_against_one_both_are_named(job):
    job.did("01", "psum", "failed").did("23", "pmax", "failed", "b")
    (finding,) = job.merged().findings
    assert (finding.ranks, finding.rivals) == ((2, 3), (0, 1))
    assert job.merged().suspect == (
        "suspect: process 0 (pid 100, host node7): completed no collective on record; "
        "nobody else waits in a collective; it came to psum(float32[4]) #1 instead; "
        "equally likely: process 1 (pid 101, host node7): completed no collective on "
        "record, and it came to pmax(float32[4]) #1 instead"
    )
