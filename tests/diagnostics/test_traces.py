"""Flight records as traces for Perfetto."""

import itertools
import json

import jax
import numpy as np
import pytest

import jaxcomm
from jaxcomm.diagnostics import perfetto

ALL = "0123"


@pytest.fixture
def events(tmp_path):
    def write(merged):
        perfetto.save(merged, tmp_path / "trace.json")
        document = json.loads((tmp_path / "trace.json").read_text())
        found = {"M": [], "X": [], "s": [], "f": [], "C": []}
        for event in document["traceEvents"]:
            found[event["ph"]].append(event)
        return found

    return write


def test_a_program_s_trace_has_a_track_for_each_rank(make_mesh, tmp_path):
    def program(x):
        handle = jaxcomm.ring_shift_start(x, "b")
        total = jaxcomm.psum(x, ("a", "b"))
        return handle.done(after=total) + jaxcomm.all_gather(x, "a").sum(0)

    mesh, spec = make_mesh(a=2, b=4), jax.P(("a", "b"))
    run = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec))
    jax.block_until_ready(run(np.ones((8, 16), np.float32)))
    found = jaxcomm.flight_record()
    found.save_trace(tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    events = document["traceEvents"]
    titles = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {title for title in titles if "+" not in title} == {
        f"rank {rank} over {axes} (cpu:{device})"
        for device in range(8)
        for rank, axes in (
            (device // 4, "('a',)"), (device % 4, "('b',)"), (device, "('a', 'b')"),
        )
    }  # fmt: skip
    bars = [e for e in events if e["ph"] == "X"]
    assert len(bars) == 24
    (psum,) = [e for e in bars if e["name"] == "psum" and e["args"]["rank"] == 5]
    entries = [e for c in found.process.communicators for e in c.entries]
    (entry,) = (e for e in entries if (e.name, e.rank) == ("psum", 5))
    assert psum["args"] | {"run": 0, "site": ""} == {
        "operands": "float32[1,16]", "dtype": "float32", "bytes": 64,
        "axes": "('a', 'b')", "lane": "default", "backend": "host", "group": 0,
        "rank": 5, "state": "completed", "sequence": 1, "run": 0, "site": "",
    }  # fmt: skip
    assert psum["dur"] == pytest.approx(entry.seconds * 1e6, abs=1.1)
    origin = document["otherData"]["time 0, seconds since 1970"]
    assert origin + psum["ts"] / 1e6 == pytest.approx(entry.started, abs=1e-6)
    assert min(e["ts"] for e in bars) == 0


def test_events_of_a_track_do_not_overlap(job, events):
    # Perfetto does not show those that do.
    job.did(ALL, "permute", seconds=2.5)
    for site in "bcd":
        job.did(ALL, "all_reduce", site=site)
    found = events(job.merged())
    tracks = {}
    for event in found["X"]:
        tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    assert sorted(len(track) for track in tracks.values()) == [2] * 8
    for track in tracks.values():
        for one, after in itertools.pairwise(track):
            assert one["ts"] + one["dur"] <= after["ts"]
    titles = [e["args"]["name"] for e in found["M"] if e["name"] == "thread_name"]
    assert titles[:2] == [
        "rank 0 over ('i',) (cpu:0)", "rank 0 over ('i',) (cpu:0) +1",
    ]  # fmt: skip


def test_what_did_not_end_or_failed_is_seen(job, events):
    job.did(0, "psum", "failed").did(1, "psum", "started")
    job.did("23", "pmax", site="b")
    by_rank = {e["args"]["rank"]: e for e in events(job.merged())["X"]}
    names = [by_rank[rank]["name"] for rank in range(3)]
    assert names == ["psum (failed)", "psum (not ended)", "pmax"]
    # Until its record was written.
    assert by_rank[1]["dur"] == 2e6
    assert by_rank[1]["args"]["state"] == "started"


def test_arrows_lead_from_the_last_to_come_to_those_that_waited(job, events):
    job.did("013", "all_reduce", seconds=3.0)
    job.did(2, "all_reduce", seconds=2.0)
    found = events(job.merged())
    bar_of = {(e["pid"], e["tid"]): e for e in found["X"]}
    ends = {e["id"]: e for e in found["f"]}
    reached = set()
    for arrow in found["s"]:
        to = ends.pop(arrow["id"])
        for end in arrow, to:
            bar = bar_of[end["pid"], end["tid"]]
            assert bar["ts"] <= end["ts"] <= bar["ts"] + bar["dur"]
        assert bar_of[arrow["pid"], arrow["tid"]]["args"]["rank"] == 2
        reached.add(bar["args"]["rank"])
    assert (reached, ends) == ({0, 1, 3}, {})


def test_for_whom_others_waited_is_counted(job, events):
    """Each call of the fixture is a second later. The first meeting compiles."""
    for late in 3, 2, 2:
        others = "0123".replace(str(late), "")
        job.did(others, "psum", seconds=3.0).did(late, "psum", seconds=2.0)
    merged = job.merged()
    counters = [(e["name"], e["pid"], e["args"]) for e in events(merged)["C"]]
    name = "others waited for rank 2 of group 0 over axes ('i',), lane 'default'"
    assert counters == [(name, 2, {"seconds": 1.0}), (name, 2, {"seconds": 2.0})]
    (waited,) = merged.to_json()["waited_for"]
    assert waited["seconds"] == {0: 0.0, 1: 0.0, 2: 2.0, 3: 0.0}
    assert "others waited 2 s for rank 2 of group 0 over axes ('i',)" in str(merged)
    # Both processes have two ranks, and ranks 0 and 1 are of the other one.
    assert merged.suspect.startswith("suspect: process 1 (pid 101, host node7): last ")
    assert merged.suspect.endswith("process 0 waited 2 s for it in all; it is slow")
