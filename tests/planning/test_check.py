"""Predicted beside measured: which collectives meet, and what is good."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import jaxcomm
from jaxcomm.diagnostics import record


def test_a_run_is_held_to_its_plan(make_mesh, tmp_path):
    mesh = make_mesh(data=2, context=4)

    def step(x):
        x = jaxcomm.psum(x, "context")
        x = jaxcomm.ring_shift(x, "data", lane="ring")
        return jax.lax.psum(x, "data")

    program = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=jax.P("data", "context"),
            out_specs=jax.P(),
            check_vma=False,
        )
    )
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
    assert by_name["lax.psum"].measured is None
    assert by_name["lax.psum"].is_good is None
    text = str(rows)
    assert "XLA keeps no record" in text
    assert "4 of 4" in text
    assert "<table>" in rows._repr_html_()
    # Records may come from files, and one may stand alone.
    saved, path = jaxcomm.flight_record(), tmp_path / "record.json"
    saved.save(path)
    here = json.loads(json.dumps(made.check([saved]).to_json()))
    assert (here[0]["collective"], here[0]["count"]) == ("psum", 10)
    for records in ([path], saved, path, str(path)):
        assert made.check(records).to_json() == here
    with pytest.raises(TypeError, match="records must be flight records"):
        made.check([3])
    with pytest.raises(ValueError, match=r"^check: records is empty\. Give one"):
        made.check([])


def test_a_plan_without_a_function_is_refused():
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
    made = jaxcomm.plan(
        {"d": 2, "i": 2},
        lambda x: jaxcomm.psum(x, "i"),
        jax.ShapeDtypeStruct((words,), "float32"),
        machine="cpu",
    )
    (row,) = made.check(records)
    return row


def test_time_runs_from_the_last_arrival_to_the_last_end():
    # From 13 s to 15.25 s. Of one process alone, with what it waited.
    first, second = process(0, (10.0, 5.0)), process(1, (13.0, 2.25))
    both, alone = checked(first, second), checked(first)
    assert (both.measured, both.seen, both.size, both.count) == (2.25, 2, 2, 1)
    assert (alone.measured, alone.seen) == (5.0, 1)
    # 30 us of latency, and what four floats of two ranks take at 40 GB/s, both ways.
    assert both.ratio == pytest.approx((30e-6 + 64 / 40e9) / 2.25)


def test_the_median_is_measured():
    row = checked(
        process(0, (10.0, 1.0), (20.0, 2.0), (30.0, 9.0)),
        process(1, (10.0, 1.0), (20.0, 2.0), (30.0, 9.0)),
    )
    assert (row.measured, row.count) == (2.0, 3)


def test_the_ranks_seen_are_those_of_the_group_that_is_seen_least():
    row = checked(process(0, (10.0, 1.0)), process(1, (10.0, 1.0)), process(2, (8, 3)))
    assert (row.seen, row.size, row.count) == (1, 2, 2)


@pytest.mark.parametrize("other", [(), ((13.0, None),)])
def test_what_has_not_ended_on_all_ranks_has_no_time(other):
    others_first = process(1, (5.0, 1.0), *other)
    row = checked(process(0, (5.0, 1.0), (10.0, 5.0)), others_first)
    assert (row.measured, row.count) == (1.0, 1)


@pytest.mark.parametrize(
    ("words", "ratio", "is_good"),
    [
        (1 << 18, 0.81, True),
        (1 << 18, 0.79, False),
        (1 << 18, 1.24, True),
        (1 << 18, 1.26, False),
        ((1 << 18) - 1, 0.51, True),
        ((1 << 18) - 1, 0.49, False),
        ((1 << 18) - 1, 1.99, True),
        ((1 << 18) - 1, 2.1, False),
    ],
)
def test_bounds_are_tighter_from_a_mebibyte_on(words, ratio, is_good):
    row = checked(process(0, (1.0, 1.0)), words=words)
    row = dataclasses.replace(row, measured=row.predicted.value / ratio)
    assert row.is_good is is_good
