"""Flight records as traces for Perfetto and for torch's analyzer."""

import itertools
import json
import pickle

import jax
import numpy as np
import pytest

import jaxcomm
from jaxcomm.diagnostics import fr_trace, perfetto
from jaxcomm.diagnostics.flight_record import FlightRecord

ALL = "0123"


@pytest.fixture
def events(tmp_path):
    """Returns ``events(merged)``: the events of its trace, by phase."""

    def write(merged):
        perfetto.save(merged, tmp_path / "trace.json")
        document = json.loads((tmp_path / "trace.json").read_text())
        found = {"M": [], "X": [], "s": [], "f": []}
        for event in document["traceEvents"]:
            found[event["ph"]].append(event)
        return found

    return write


@pytest.fixture
def dumps(tmp_path):
    """Returns ``dumps(merged)``: what torch's analyzer reads, by rank."""

    def write(merged):
        fr_trace.save(merged, tmp_path / "fr")
        return {
            int(path.name.rpartition("_")[2]): pickle.loads(path.read_bytes())
            for path in (tmp_path / "fr").iterdir()
        }

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


def test_events_that_touch_share_a_track(job, events):
    # By rounding, an operation may seem to end after the next has begun.
    for site in "abc":
        job.did(0, "psum", site=site, seconds=1.0000007)
    one, two, three = events(job.merged())["X"]
    assert one["tid"] == two["tid"] == three["tid"]
    assert one["dur"] == two["dur"] == 1e6
    assert three["dur"] == pytest.approx(1e6 + 0.7, abs=0.3)


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


def test_processes_of_several_hosts_are_on_one_clock(job, events):
    job.hosts, job.wrong = {0: "node7", 1: "node8"}, {1: 100}
    job.did(ALL, "all_reduce")
    found = events(job.merged())
    assert {e["ts"] for e in found["X"]} == {0}
    # Perfetto tells threads apart by their numbers, whatever their process.
    processes = {e["pid"] for e in found["X"]}
    threads = {e["tid"] for e in found["X"]}
    assert (len(processes), len(threads)) == (2, 4)
    assert not processes & threads
    assert {e["args"]["name"] for e in found["M"] if e["name"] == "process_name"} == {
        "process 0 (pid 100, node7)", "process 1 (pid 101, node8)",
    }  # fmt: skip


def test_what_is_no_trace_is_refused(job, tmp_path):
    path = tmp_path / "x"

    def record_of(process):
        return FlightRecord(json.dumps(job.document(process)))

    def refuses(text, show, *args, **options):
        with pytest.raises(ValueError, match=text):
            show(*args, **options)

    refuses("no operation is on record", record_of(0).plot)
    refuses("no operation is on record", record_of(0).save_trace, path)
    job.did(ALL, "psum")
    save = record_of(1).save_trace
    refuses("be 'perfetto' or 'fr_trace', got 'csv'", save, path, format="csv")
    refuses(r"of process 1 of 2.*--merge FILE", save, path, format="fr_trace")
    job.did(ALL, "psum(int32[])", axes="j", platform="gpu")
    refuses(r"devices of \['cpu', 'gpu'\]", fr_trace.save, job.merged(), path)


def test_torch_s_analyzer_gets_groups_and_operations(job, dumps):
    job.did(ALL, "all_gather(float32[4,2], int32[])", run=7)
    job.did("013", "reduce_scatter(float32[8])", "started", site="b")
    found = dumps(job.merged())
    assert sorted(found) == [0, 1, 2048, 2049]
    for dump in found.values():
        ((name, group),) = dump["pg_config"].items()
        assert group == {
            "name": name, "desc": "axes ('i',), lane 'default'",
            "ranks": "[0, 1, 2048, 2049]",
        }  # fmt: skip
        first, *rest = dump["entries"]
        assert first["process_group"] == (name, group["desc"])
        assert first["profiling_name"] == "nccl:_all_gather_base"
        assert first["input_sizes"] == [[4, 2], []]
        assert first["output_sizes"] == [[4, 4, 2], [4]]
        assert first["input_dtypes"] == ["float32", "int32"]
        assert (first["collective_seq_id"], first["state"]) == (1, "completed")
        assert first["frames"][0]["name"] == "all_gather(float32[4,2], int32[])"
        assert [entry["output_sizes"] for entry in rest] == [[[2]]] * len(rest)
    assert [len(found[rank]["entries"]) for rank in sorted(found)] == [2, 2, 1, 2]


def test_torch_s_analyzer_gets_times_and_what_is_over(make_job, dumps):
    """In torch's units, by its docs. What is over is retired, if it failed too."""
    job = make_job(forget=2)
    for _ in range(3):
        job.did(0, "psum")
    job.did(0, "psum", "failed", site="b")
    job.did(0, "psum", "started", site="c")
    start, second = 1_700_000_002_000_000_000, 1_000_000_000
    entries = dumps(job.merged())[0]["entries"]
    names = "record_id", "state", "retired", "duration_ms"
    times = "time_created_ns", "time_discovered_completed_ns"
    assert [tuple(map(entry.get, names + times)) for entry in entries] == [
        (2, "completed", True, 500.0, start, start + second // 2),
        (3, "started", True, None, start + second, None),
        (4, "started", False, None, start + 2 * second, None),
    ]
    assert entries[0]["timeout_ms"] == 300_000


def test_ranks_that_took_another_order_have_the_same_numbers(job, dumps):
    job.did("01", "psum", site="a").did("01", "pmax(int32[])", site="b")
    job.did("23", "pmax(int32[])", site="b").did("23", "psum", site="a")
    for dump in dumps(job.merged()).values():
        for entry in dump["entries"]:
            number = {"psum(float32[4])": 1, "pmax(int32[])": 2}
            assert entry["collective_seq_id"] == number[entry["frames"][0]["name"]]


def test_a_rank_that_did_nothing_has_a_file_and_a_lost_process_none(make_job, dumps):
    job = make_job(devices={0: [0, 1], 1: [2]}).did(0, "psum", "started")
    found = {rank: len(dump["entries"]) for rank, dump in dumps(job.merged(0)).items()}
    assert found == {0: 1, 1: 0}


def test_a_folder_with_ranks_of_another_job_is_refused(make_job, dumps, tmp_path):
    dumps(make_job(devices={0: [0, 1, 2]}).did(0, "psum(int32[])").merged())
    job = make_job(devices={0: [0, 1]}).did("01", "psum(int32[])")
    with pytest.raises(ValueError, match=r"files of other ranks, jaxcomm_rank_2, whi"):
        dumps(job.merged())
    (tmp_path / "fr" / "jaxcomm_rank_2").unlink()
    assert len(dumps(job.merged())) == 2
