"""The records of all processes together say who is behind, and at what."""

import json

import pytest

from jaxcomm.diagnostics.merge import merge_files
from jaxcomm.diagnostics.record import RecordError

ALL = range(4)


def test_the_rank_that_did_not_come_is_named_with_what_it_did_last(job):
    for _ in range(41):
        job.did(ALL, "psum(float32[4])")
    job.did([0, 1, 3], "all_gather(float32[8])", "started", site="b")
    (found,) = job.merged().findings
    assert found.text == (
        "rank 2 (process 1, cpu:2048) last completed psum(float32[4]) #41; "
        "ranks 0, 1, 3 wait in all_gather(float32[8]) #42"
    )
    assert (found.kind, found.ranks, found.group) == ("behind", (2,), 0)


def test_ranks_that_gave_up_are_told_from_those_that_wait(job):
    job.did(ALL, "psum(float32[4])").did([0, 1], "psum(int32[])", "failed", site="b")
    assert job.texts() == [
        "rank 2 (process 1, cpu:2048) and rank 3 (process 1, cpu:2049) last completed "
        "psum(float32[4]) #1; rank 0 (process 0, cpu:0) and rank 1 (process 0, cpu:1) "
        "gave up in psum(int32[]) #2"
    ]


def test_a_rank_that_has_done_nothing_yet(job):
    job.did([0, 1, 2], "psum(float32[4])", "started")
    assert job.texts() == [
        "rank 3 (process 1, cpu:2049) never used this communicator or has closed "
        "it; ranks 0-2 wait in psum(float32[4]) #1"
    ]


def test_one_rank_with_other_shapes(job):
    for _ in range(16):
        job.did(ALL, "psum(float32[2])")
    job.did([0, 2, 3], "psum(float32[8])", "failed", site="b")
    job.did(1, "psum(float32[4])", "failed", site="b")
    (found,) = job.merged().findings
    assert found.text == (
        "at #17 rank 1 (process 0, cpu:1) ran psum(float32[4]) where ranks 0, 2, 3 ran "
        "psum(float32[8])"
    )
    assert (found.kind, found.ranks) == ("mismatch", (1,))


def test_ranks_that_wait_for_each_other_in_two_places(job):
    # As after jax.lax.cond on axis_index: two call sites, each with some of the ranks.
    job.did([0, 1, 2], "psum(float32[4])", "started", site="b")
    job.did(3, "all_gather(float32[4])", "started", site="c")
    (found,) = job.merged().findings
    assert found.text == (
        "at #1 rank 3 (process 1, cpu:2049) ran all_gather(float32[4]) where ranks 0-2 "
        "ran psum(float32[4])"
    )
    assert found.kind == "mismatch"


def test_of_parties_of_equal_size_the_later_one_is_blamed(job):
    job.did([0, 1], "psum(float32[4])", "started", site="b")
    job.did([2, 3], "pmax(float32[4])", "started", site="c")
    (found,) = job.merged().findings
    assert found.ranks == (2, 3)


def test_the_same_call_at_another_place_or_launch_or_with_other_parameters(make_job):
    place = make_job().did([0, 1, 2], "psum(float32[4])", "started", site="b")
    place.did(3, "psum(float32[4])", "started", site="c")
    assert place.texts()[0].endswith("psum(float32[4]) at another place of the program")
    launch = make_job().did([0, 1, 2], "psum(float32[4])", "started", run=7)
    launch.did(3, "psum(float32[4])", "started", run=8)
    assert launch.texts()[0].endswith("in another launch of a program")
    other = make_job().did([0, 1, 2], "ppermute(float32[4])", "failed", signature="1")
    other.did(3, "ppermute(float32[4])", "failed", signature="2")
    assert other.texts()[0].endswith(
        "ppermute(float32[4]) with other parameters or results"
    )


def test_the_numbers_of_both_are_given_where_they_differ(job):
    # One rank left an earlier program when it failed, and counts less since.
    job.did([0, 1, 2], "psum(float32[4])", "failed", run=1)
    job.did(ALL, "psum(float32[4])", run=2)
    job.did([0, 1, 2], "psum(float32[4])", "started", site="b", run=3)
    job.did(3, "pmax(float32[4])", "started", site="c", run=3)
    assert job.texts() == [
        "rank 3 (process 1, cpu:2049) ran pmax(float32[4]) as #2 where ranks 0-2 ran "
        "psum(float32[4]) as #3"
    ]


def test_operations_of_nccl_meet_by_their_number(make_job):
    """Its ranks have one order, and those of other processes other run ids of XLA's."""
    job = make_job(backend="nccl")
    for number in range(3):
        job.did([0, 1], "psum(float32[4])", run=7 + number)
        job.did([2, 3], "psum(float32[4])", run=9 + number)
    job.did([0, 1], "psum(float32[4])", "started", run=10)
    job.did(2, "psum(float32[4])", "started", run=12)
    assert job.texts() == [
        "rank 3 (process 1, cpu:2049) last completed psum(float32[4]) #3; ranks 0-2 "
        "wait in psum(float32[4]) #4"
    ]


def test_a_record_of_an_earlier_job_is_told(job):
    job.did(ALL, "psum(float32[4])")
    (_, late) = job.write()
    text = "process 0 wrote its record before process 1 began"
    assert text not in str(merge_files(job.write()))
    document = json.loads(late.read_text())
    earlier = late.with_stem("flight-record-0")
    # Another host has another clock.
    for host, is_told in (("node7", True), ("node8", False)):
        late.write_text(json.dumps(document | {"began": job.time + 1, "host": host}))
        assert (text in str(merge_files([earlier, late]))) == is_told


def test_failures_that_were_survived_are_no_findings(job):
    assert "No operation was recorded." in str(job.merged())
    job.did(ALL, "psum(float32[4])", "failed", run=1).did(ALL, "psum(int8[])", run=2)
    merged = job.merged()
    assert merged.findings == []
    assert "Nobody waits. 8 operations are on record; 4 failed before" in str(merged)


def test_independent_operations_in_another_order_are_no_mismatch(job):
    # Rank 3 comes to b first; it has not come to c.
    job.did([0, 1, 2], "psum(float32[4])", "started", site="c")
    job.did([0, 1, 2], "pmax(float32[4])", "started", site="b")
    job.did(3, "pmax(float32[4])", "started", site="b")
    kinds = {finding.kind: finding for finding in job.merged().findings}
    assert set(kinds) == {"behind", "slow"}
    assert kinds["behind"].text == (
        "rank 3 (process 1, cpu:2049) came to pmax(float32[4]) #1 instead; ranks 0-2 "
        "wait in psum(float32[4]) #1"
    )


def test_completed_operations_in_another_order_are_no_findings(job):
    job.did([0, 1], "psum(float32[4])", site="c").did([0, 1], "pmax(int8[])", site="b")
    job.did([2, 3], "pmax(int8[])", site="b").did([2, 3], "psum(float32[4])", site="c")
    assert job.texts() == []


@pytest.mark.parametrize("forget", [0, 90])
def test_turns_of_a_loop_are_told_apart_by_their_count(make_job, forget):
    # With 90 forgotten no ring remembers the beginning of the run.
    job = make_job(forget=forget)
    for _ in range(100):
        job.did(ALL, "ppermute(float32[4])", site="loop")
    job.did([0, 1, 2], "ppermute(float32[4])", "started", site="loop")
    assert job.texts() == [
        "rank 3 (process 1, cpu:2049) last completed ppermute(float32[4]) #100; ranks "
        "0-2 wait in ppermute(float32[4]) #101"
    ]


def test_rings_that_forgot_different_parts_of_a_loop_are_compared_where_both_know(job):
    for _ in range(30):
        job.did(ALL, "ppermute(float32[4])", site="loop")
    job.did([0, 1], "ppermute(float32[4])", "started", site="loop")
    first, second = job.document(0), job.document(1)
    (communicator,) = first["communicators"]
    communicator["entries"] = [
        entry for entry in communicator["entries"] if entry["sequence"] > 20
    ]
    paths = job.write()
    for path, document in zip(paths, (first, second), strict=True):
        path.write_text(json.dumps(document))
    (found,) = merge_files(paths).findings
    assert found.text == (
        "rank 2 (process 1, cpu:2048) and rank 3 (process 1, cpu:2049) last completed "
        "ppermute(float32[4]) #30; rank 0 (process 0, cpu:0) and rank 1 (process 0, "
        "cpu:1) wait in ppermute(float32[4]) #31"
    )


def test_all_have_come_or_one_came_too_late(make_job):
    moving = make_job().did([0, 1, 3], "psum(float32[4])", "started")
    assert moving.did(2, "psum(float32[4])", "started").texts() == [
        "all ranks came to psum(float32[4]) #1; rank 2 (process 1, cpu:2048) came "
        "last, 1 s after the first; bytes were moving"
    ]
    late = make_job().did([0, 1, 2], "psum(float32[4])", "failed")
    late.time += 29
    (text,) = late.did(3, "psum(float32[4])", "failed").texts()
    assert text.endswith("came last, 30 s after the first; ranks 0-3 failed")


def test_a_pair_that_is_done_early_is_not_missing(job):
    # A permutation completes pair by pair.
    job.did([0, 1], "ppermute(float32[4])").did(2, "ppermute(float32[4])", "started")
    assert job.texts() == [
        "rank 3 (process 1, cpu:2049) never used this communicator or has closed "
        "it; rank 2 (process 1, cpu:2048) waits in ppermute(float32[4]) #1"
    ]


def test_a_process_without_a_record_is_named(job):
    job.did(ALL, "psum(float32[4])").did([0, 1], "psum(float32[4])", "failed", run=2)
    merged = job.merged(0)
    assert merged.missing == (1,)
    (found,) = merged.findings
    assert found.text.startswith(
        "rank 2 (process 1, cpu:2048) and rank 3 (process 1, cpu:2049) left no record; "
    )
    document = json.loads(json.dumps(merged.to_json()))
    assert document["missing"] == [1]
    assert document["processes"]["0"]["reason"] == "timeout"
    assert [found["kind"] for found in document["findings"]] == ["behind"]
    assert "flight records of 1 of 2 processes (timeout: 0)" in str(merged)
    assert "no record of process 1: killed, still computing, or" in str(merged)


def test_of_several_missing_processes_nobody_knows_which_rank_is_whose(make_job):
    job = make_job(devices={0: [0], 1: [5], 2: [6]})
    job.did(0, "psum(float32[4])", "started")
    merged = job.merged(0)
    assert merged.missing == (1, 2)
    assert "rank 1 (cpu:5) and rank 2 (cpu:6) left no record" in merged.findings[0].text
    assert "no record of processes 1, 2: " in str(merged)


def test_a_rank_that_waits_in_another_communicator_is_followed_there(job):
    job.did([0, 1, 2], "psum(float32[4])", "started")
    job.did(3, "all_gather(int8[2])", "started", axes="('j',)", site="z")
    first, second = job.merged().findings
    assert first.text == (
        "rank 3 (process 1, cpu:2049) never used this communicator or has closed "
        "it, now in all_gather(int8[2]) #1 of axes ('j',), lane 'default'; ranks 0-2 "
        "wait in psum(float32[4]) #1"
    )
    assert first.title == "axes ('i',), lane 'default'"
    assert second.title == "axes ('j',), lane 'default'"
    assert second.text.count(", now in psum(float32[4]) #1 of axes ('i',)") == 1


def test_what_began_first_comes_first(make_job):
    job = make_job(devices={0: [0, 1], 1: [2, 3]}, groups=[[0, 2], [1, 3]])
    job.did(1, "psum(float32[4])", "started", group=1)
    job.did(0, "psum(float32[4])", "started", group=0)
    assert [finding.group for finding in job.merged().findings] == [1, 0]


def test_only_groups_in_trouble_are_drawn(make_job):
    job = make_job(devices={0: [0, 1], 1: [2, 3]}, groups=[[0, 2], [1, 3]])
    job.did([0, 1], "psum(float32[4])", group=0)
    job.did([0, 1], "psum(float32[4])", group=1)
    job.did(0, "pmax(float32[4])", "started", group=1)
    lines = str(job.merged()).splitlines()
    start = lines.index("axes ('i',), lane 'default'")
    assert lines[start + 1].split() == [
        "group", "rank", "process", "device", "last", "completed", "now", "for",
    ]  # fmt: skip
    assert [line.split() for line in lines[start + 3 : start + 5]] == [
        ["1", "0", "0", "cpu:1", "psum(float32[4])", "#1", "started",
         "pmax(float32[4])", "#2", "1", "s"],
        ["1", "1", "1", "cpu:3", "psum(float32[4])", "#1"],
    ]  # fmt: skip
    assert lines[start + 5] == ""


def test_files_that_cannot_be_compared_are_refused_by_name(job, make_job, tmp_path):
    job.did(ALL, "psum(float32[4])")
    paths = job.write()
    with pytest.raises(RecordError, match="no flight record was given"):
        merge_files([])
    with pytest.raises(RecordError, match=r"flight-record-0.json and .* both of proce"):
        merge_files([paths[0], paths[0]])
    other = make_job(devices={0: [0], 1: [1], 2: [2]})
    with pytest.raises(
        RecordError, match=r"-2.json is of a job of 3 processes and .*2;"
    ):
        merge_files([paths[0], *other.write(2)])
    document = job.document(1)
    document["communicators"][0]["groups"] = [[0, 1, 2048, 2049, 5]]
    paths = job.write()
    paths[1].write_text(json.dumps(document))
    with pytest.raises(RecordError, match="disagree on the groups of axes"):
        merge_files(paths)
