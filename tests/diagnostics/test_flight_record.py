"""The last operations of every communicator, on demand."""

import json

import jax
import numpy as np
import pytest

import jaxcomm
from jaxcomm.diagnostics import record
from jaxcomm.diagnostics.flight_record import FlightRecord


@pytest.fixture
def mesh(make_mesh):
    return make_mesh(a=2, b=4)


@pytest.fixture
def run(mesh):
    def run(call):
        split = {"in_specs": jax.P(("a", "b")), "out_specs": jax.P(("a", "b"))}
        program = jax.jit(jax.shard_map(call, mesh=mesh, **split))
        return jax.block_until_ready(program(np.arange(8, dtype=np.float32)))

    return run


def entries_of(communicator=None):
    found = jaxcomm.flight_record(communicator)
    return [entry for each in found.process.communicators for entry in each.entries]


def test_every_rank_s_operations_are_recorded(run):
    before = jaxcomm.flight_record().process.time
    run(lambda x: jaxcomm.all_gather(x, "b", tiled=True).sum(keepdims=True))
    run(lambda x: sum(jaxcomm.pmax((x, x), "b")))
    process = jaxcomm.flight_record().process
    assert (process.process, process.processes) == (0, 1)
    assert process.reason == "asked"
    assert process.devices == {"cpu": tuple(range(8))}
    entries = entries_of(jaxcomm.communicators()[0])
    assert {(e.group, e.rank, e.device) for e in entries} == {
        (device // 4, device % 4, device) for device in range(8)
    }
    of_device = {
        device: [e for e in entries if e.device == device] for device in range(8)
    }
    for first, second in of_device.values():
        assert (first.sequence, second.sequence) == (1, 2)
        assert (first.collective, second.collective) == ("all_gather", "all_reduce")
        assert first.operation == "all_gather(float32[1])"
        assert second.operation == "pmax(float32[1], float32[1])"
        assert (first.bytes, second.bytes, first.dtype) == (4, 8, "float32")
        assert {first.state, second.state} == {"completed"}
        assert before - 1e-6 <= first.started <= first.ended
        assert first.ended <= second.started + 1e-6
        assert second.ended <= process.time + 1e-6
    for same in zip(*of_device.values(), strict=True):
        assert len({(e.site, e.run_id, e.signature) for e in same}) == 1
    assert len({e.run_id for e in entries}) == 2
    assert [e.started for e in entries] == sorted(e.started for e in entries)


def test_operations_that_end_pair_by_pair_are_recorded_by_their_names(run):
    """Also of ranks that neither send nor receive. Both calls have one plan."""
    run(lambda x: jaxcomm.ppermute(x, "b", [(0, 1), (1, 0)]))
    assert [e.operation for e in entries_of()] == ["ppermute(float32[1])"] * 8
    run(lambda x: jaxcomm.ppermute(x, "a", [(0, 1), (1, 0)]))
    run(lambda x: jaxcomm.ring_shift(x, "a"))
    found = entries_of(jaxcomm.communicators()[1])
    assert {e.state for e in found} == {"completed"}
    assert sorted(e.name for e in found) == ["ppermute"] * 8 + ["ring_shift"] * 8


def test_communicators_are_told_apart_and_can_be_asked_for_alone(run):
    run(lambda x: jaxcomm.psum(jaxcomm.psum(x, "a"), "b") + x)
    both = jaxcomm.flight_record().process.communicators
    assert [c.axes for c in both] == ["('a',)", "('b',)"]
    first = both[0]
    assert first.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert (first.lane, first.backend, first.platform) == ("default", "host", "cpu")
    assert first.timeout_seconds == 300
    (live, _) = jaxcomm.communicators()
    (alone,) = jaxcomm.flight_record(live).process.communicators
    # Equal but for the last digits of the times, which are reckoned from now.
    assert alone.groups == first.groups
    for one, other in zip(alone.entries, first.entries, strict=True):
        assert (one.sequence, one.device) == (other.sequence, other.device)
    assert int(alone.key, 16) == live.key % 2**64


def test_a_communicator_made_anew_counts_anew(mesh, run):
    run(lambda x: jaxcomm.psum(x, "b") + x)
    jaxcomm.finalize()
    assert str(jaxcomm.flight_record()).endswith(
        ": no communicator of jaxcomm's own is live"
    )
    jaxcomm.init(mesh, "b")
    assert entries_of() == []
    assert str(jaxcomm.flight_record()).endswith("\n  no operation yet")
    run(lambda x: jaxcomm.psum(x, "b") + x)
    assert {e.sequence for e in entries_of()} == {1}


def test_what_keeps_no_record_is_refused(mesh):
    closed = (table := jaxcomm.init(mesh, "b"))[0]
    closed.close()
    (of_xla,) = jaxcomm.init(mesh, "b", backend="xla")
    for found, error, text in (
        *((of, TypeError, r"one of jaxcomm\.communicators") for of in ("x", table, 0)),
        (closed, jaxcomm.CommunicatorError, "is closed and its record gone"),
        (of_xla, ValueError, "lane='default' backend=xla .* keeps no reco"),
    ):
        with pytest.raises(error, match=text):
            jaxcomm.flight_record(found)


def test_a_record_is_saved_and_shown_with_a_row_for_ranks_that_did_the_same(
    run, tmp_path
):
    run(lambda x: jaxcomm.psum(x, "b") + x)
    found = jaxcomm.flight_record()
    found.save(tmp_path / "mine.json")
    assert record.load(tmp_path / "mine.json") == found.process
    assert json.loads((tmp_path / "mine.json").read_text()) == found.to_json()
    assert found.to_json()["communicators"][0]["entries"][0]["name"] == "psum"

    lines = str(found).splitlines()
    assert lines[0].startswith("flight record of process 0 of 1 (pid ")
    assert lines[2] == "axes ('b',), lane 'default', backend host, 2 groups of 4"
    head = " ".join(lines[3].split())
    assert head == "# group ranks operation bytes state started took"
    shown = sorted(" ".join(line.split()[:7]) for line in lines[5:])
    assert shown == [f"1 {i} 0-3 psum(float32[1]) 4 B completed" for i in range(2)]
    html = found._repr_html_()
    assert html.count("<td>psum(float32[1])</td>") == html.count("<td>0-3</td>") == 2


def test_what_is_open_is_shown_however_long_ago_it_began(make_job):
    job = make_job(devices={0: [0, 1]}, groups=[[0], [1]])
    job.did(0, "psum", "started", group=0)
    for _ in range(40):
        job.did(0, "pmax", group=1)
    drawn = str(FlightRecord(json.dumps(job.document(0))))
    assert drawn.count("psum(float32[4])") == 1
    assert drawn.count("pmax(float32[4])") == 20
    assert "  (20 earlier rows: see to_json())" in drawn
    # What has not ended has taken until now.
    assert "started    " in drawn
    assert drawn.splitlines()[5].endswith("  41 s")
