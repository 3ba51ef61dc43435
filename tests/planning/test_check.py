"""Predicted beside measured: which collectives meet, and what is good."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import jaxcomm
from jaxcomm.diagnostics import record
from jaxcomm.diagnostics.timing import timed


@pytest.fixture
def ran(make_mesh):
    """A plan of a program, and the program's record."""
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
    for _ in range(5):
        jax.block_until_ready(program(x))
    return made


def test_every_call_is_measured_by_group(ran):
    rows = ran.check()
    by_name = {row.planned.call.name: row for row in rows}
    # Five runs of two groups of four, and of four groups of two.
    psum, shift = by_name["psum"], by_name["ring_shift"]
    assert (psum.count, psum.seen, psum.size) == (10, 4, 4)
    assert (shift.count, shift.seen, shift.size) == (20, 2, 2)
    assert psum.measured > 0
    assert psum.ratio == psum.predicted.value / psum.measured
    # XLA's are not ours to measure.
    assert by_name["lax.psum"].measured is None
    assert by_name["lax.psum"].is_good is None
    text = str(rows)
    assert "XLA keeps no record" in text
    assert "4 of 4" in text
    assert "<table>" in rows._repr_html_()
    assert json.loads(json.dumps(rows.to_json()))[0]["collective"] == "psum"


def predicted(row, ratio, size):
    call = row.planned.call
    leaves = (((size // 4,), "float32"),)
    seconds = dataclasses.replace(row.predicted, value=ratio * row.measured)
    planned = dataclasses.replace(
        row.planned,
        call=dataclasses.replace(call, leaves=leaves),
        cost=dataclasses.replace(row.planned.cost, seconds=seconds),
    )
    return dataclasses.replace(row, planned=planned)


@pytest.mark.parametrize(
    ("size", "ratio", "is_good"),
    [
        (1 << 20, 1.0, True),
        (1 << 20, 0.79, False),
        (1 << 20, 1.26, False),
        (1 << 10, 0.51, True),
        (1 << 10, 1.99, True),
        (1 << 10, 0.49, False),
        (1 << 10, 2.1, False),
    ],
)
def test_bounds_are_tighter_for_large_operands(ran, size, ratio, is_good):
    row = predicted(ran.check()[0], ratio, size)
    assert row.is_good is is_good
    assert type(ran.check())([row]).is_good is is_good


def test_nothing_measured_is_not_good(ran):
    jaxcomm.finalize()
    rows = ran.check()
    assert [row.count for row in rows] == [0, 0, 0]
    assert not rows.is_good
    assert "not in the record" in str(rows)


def test_records_may_come_from_files(ran, tmp_path):
    saved = jaxcomm.flight_record()
    saved.save(tmp_path / "record.json")
    here = ran.check([saved]).to_json()
    assert here[0]["count"] == 10
    assert ran.check([tmp_path / "record.json"]).to_json() == here
    with pytest.raises(TypeError, match="records must be flight records"):
        ran.check([3])


def test_a_plan_without_a_function_is_refused():
    with pytest.raises(ValueError, match="no collectives to compare"):
        jaxcomm.plan({"i": 2}).check()


def entry(rank, started, seconds, **changes):
    known = {
        "sequence": 1, "rank": rank, "group": 0, "device": rank, "run_id": 7,
        "site": "1f", "collective": "all_reduce", "name": "psum",
        "operands": "float32[4]", "dtype": "float32", "bytes": 16,
        "state": "completed", "started": started, "seconds": seconds,
    }  # fmt: skip
    return known | changes


def process(index, entries, processes=2):
    return record.parse(
        {
            "version": 1, "process": index, "processes": processes, "pid": index,
            "host": "here", "time": 100.0, "reason": "asked",
            "devices": {"cpu": [index]},
            "communicators": [
                {
                    "key": "c0", "axes": "('i',)", "lane": "default",
                    "backend": "host", "platform": "cpu", "groups": [[0, 1]],
                    "timeout_seconds": 300.0, "entries": entries,
                }
            ],
        }
    )  # fmt: skip


def test_time_runs_from_the_last_arrival_to_the_last_end():
    records = [
        process(0, [entry(0, 10.0, 5.0)]),
        process(1, [entry(1, 13.0, 2.25)]),
    ]
    (met,) = timed(records)
    assert (met.seconds, met.seen) == (2.25, 2)
    # Of one process alone, with what it waited.
    (met,) = timed(records[:1])
    assert (met.seconds, met.seen) == (5.0, 1)


def test_what_has_not_ended_on_all_ranks_has_no_time():
    records = [
        process(0, [entry(0, 10.0, None, state="started")]),
        process(1, [entry(1, 13.0, 2.0)]),
    ]
    assert list(timed(records)) == []
    records = [process(0, [entry(0, 10.0, 1.0)]), process(1, [])]
    assert [met.seen for met in timed(records)] == [1]


def test_one_record_may_stand_alone(ran, tmp_path):
    recorded = jaxcomm.flight_record()
    recorded.save(tmp_path / "record.json")
    for records in (recorded, tmp_path / "record.json", str(tmp_path / "record.json")):
        assert [row.count for row in ran.check(records)] == [
            row.count for row in ran.check([recorded])
        ]
    with pytest.raises(ValueError, match=r"^check: records is empty\. Give one"):
        ran.check([])
