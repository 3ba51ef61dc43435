"""Predicted beside measured: which collectives meet, and what is good."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxcomm
from jaxcomm.diagnostics import record
from jaxcomm.machine import Sample
from jaxcomm.planning.check import Check


def test_a_run_is_held_to_its_plan(make_mesh, tmp_path):
    mesh = make_mesh(data=2, context=4)

    def step(x):
        x = jaxcomm.psum(x, "context")
        x = jaxcomm.ring_shift(x, "data", lane="ring")
        return jax.lax.psum(x, "data")

    split = {"in_specs": jax.P("data", "context"), "out_specs": jax.P()}
    program = jax.jit(jax.shard_map(step, mesh=mesh, check_vma=False, **split))
    x = jnp.ones((8, 16))
    made = jaxcomm.plan(mesh, program, x, machine="cpu")
    unmeasured = made.check()
    assert [row.count for row in unmeasured] == [0, 0, 0]
    assert not unmeasured.is_good
    assert "not in the record" in str(unmeasured)
    for _ in range(5):
        jax.block_until_ready(program(x))
    rows = made.check()
    by_name = {row.planned.call.name: row for row in rows}
    # Five runs of two groups of four, and of four groups of two.
    psum, shift = by_name["psum"], by_name["ring_shift"]
    assert (psum.count, psum.seen, psum.size) == (10, 4, 4)
    assert (shift.count, shift.seen, shift.size) == (20, 2, 2)
    assert psum.measured > 0
    # XLA's are not ours to measure.
    assert by_name["lax.psum"].measured is by_name["lax.psum"].is_good is None
    # Nothing is predicted without a calibration.
    assert psum.predicted is psum.ratio is psum.is_good is None
    for text in ("XLA keeps no record", "4 of 4", "no samples"):
        assert text in str(rows)
    assert "<table>" in rows._repr_html_()
    # Records may come from files, and one may stand alone.
    saved, path = jaxcomm.flight_record(), tmp_path / "record.json"
    saved.save(path)
    here = made.check([saved])
    assert [row.count for row in here] == [10, 20, 0]
    for records in ([path], saved, path, str(path)):
        assert made.check(records) == here
    with pytest.raises(TypeError, match="records must be flight records"):
        made.check([3])
    with pytest.raises(ValueError, match=r"^check: records is empty\. Give one"):
        made.check([])
    with pytest.raises(ValueError, match="no collectives to compare"):
        jaxcomm.plan({"i": 2}).check()


def process(index, *entries):
    """Return the record of one of four processes with a device each.

    Each entry is the group, when it started, and how long it took, if it has ended.
    """
    known = {
        "run_id": 7, "site": "1f", "collective": "all_reduce", "name": "psum",
        "operands": "float32[4]", "dtype": "float32", "bytes": 16, "device": index,
        "rank": index % 2,
    }  # fmt: skip
    communicator = {
        "key": "c0", "axes": "('i',)", "lane": "default", "backend": "host",
        "platform": "cpu", "groups": [[0, 1], [2, 3]], "timeout_seconds": 300.0,
        "entries": [
            known | {
                "sequence": number, "group": index // 2, "started": started,
                "seconds": took, "state": "started" if took is None else "completed",
            }
            for number, (started, took) in enumerate(entries, 1)
        ],
    }  # fmt: skip
    return record.parse(
        {
            "version": 1, "process": index, "processes": 4, "pid": index,
            "host": "here", "time": 100.0, "reason": "asked",
            "devices": {"cpu": [index]}, "communicators": [communicator],
        }
    )  # fmt: skip


def checked(*records, words=4):
    """Return the row of the psum of a plan for two groups of two CPU devices."""
    x = jax.ShapeDtypeStruct((words,), "float32")
    machine = dataclasses.replace(
        jaxcomm.Machine.named("cpu"),
        samples=(Sample("all_reduce", "memory", 2, 4, 4 * words, 3.0),),
    )
    made = jaxcomm.plan(
        {"d": 2, "i": 2}, lambda x: jaxcomm.psum(x, "i"), x, machine=machine
    )
    (row,) = made.check(records)
    return row


THREE = (10.0, 1.0), (20.0, 2.0), (30.0, 9.0)


@pytest.mark.parametrize(
    ("done", "measured", "seen", "count"),
    [
        # From the last arrival, at 13 s, to the last end, at 15.25 s.
        ([[(10.0, 5.0)], [(13.0, 2.25)]], 2.25, 2, 1),
        # Of one process alone, with what it waited.
        ([[(10.0, 5.0)]], 5.0, 1, 1),
        # The median of three.
        ([THREE, THREE], 2.0, 2, 3),
        # The group that is seen least tells how many ranks are seen.
        ([[(10.0, 1.0)], [(10.0, 1.0)], [(8.0, 3.0)]], 2.0, 1, 2),
        # What has not begun, or not ended, on all ranks has no time.
        ([[(5.0, 1.0), (10.0, 5.0)], [(5.0, 1.0)]], 1.0, 2, 1),
        ([[(5.0, 1.0), (10.0, 5.0)], [(5.0, 1.0), (13.0, None)]], 1.0, 2, 1),
    ],
)
def test_what_is_measured_is_the_median_of_what_all_ended(done, measured, seen, count):
    row = checked(*(process(index, *entries) for index, entries in enumerate(done)))
    assert (row.measured, row.seen, row.count, row.size) == (measured, seen, count, 2)
    assert row.ratio == pytest.approx(3 / measured)


@pytest.mark.parametrize(
    ("words", "good", "bad"),
    [(1 << 18, (0.81, 1.24), (0.79, 1.26)), ((1 << 18) - 1, (0.51, 1.99), (0.49, 2.1))],
)
def test_bounds_are_tighter_from_a_mebibyte_on(words, good, bad):
    row = checked(process(0, (1.0, 3.0)), words=words)
    for ratio in good + bad:
        found = dataclasses.replace(row, measured=row.predicted / ratio)
        assert found.is_good is Check([row, found]).is_good is (ratio in good)
        assert ("NO" in str(Check([found]))) is (ratio not in good)
