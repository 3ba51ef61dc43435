"""Checksums name the first collective at which two runs differ, and never say equal."""

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import threading

import forked
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import waiting

import jaxcomm
from jaxcomm import config
from jaxcomm.diagnostics import checksums
from jaxcomm.diagnostics.checksum_files import load
from jaxcomm.primitives.checksums import checksum

PROGRAM = pathlib.Path(__file__).with_name("checksummed.py")
STAND_IN = os.environ.get("JAXCOMM_TEST_FAKE_NCCL")
# In a step: two collectives in each of three turns, one of them in each of their
# gradients, the sum of the gradient, and its parts.
CALLS = 3 * 2 + 3 + 1 + 1


def run(folder, backend="host", devices=4, wrong=(-1, -1), processes=1):
    """Run the program; returns the folder of its records."""
    env = os.environ | {"JAXCOMM_CHECKSUMS": "1"}
    env |= {"JAX_NUM_CPU_DEVICES": str(devices // processes)}
    env["XLA_FLAGS"] = env["QUICK_XLA_FLAGS"]
    if backend == "nccl":
        env["JAXCOMM_NCCL_LIBRARY"] = STAND_IN
    command = [sys.executable, str(PROGRAM)]
    if processes > 1:
        command = [sys.executable, "-P", "-m", "jaxcomm.launch", f"-n{processes}"]
        command += [f"--devices-per-process={devices // processes}", str(PROGRAM)]
    command += [str(folder), backend, str(devices), *map(str, wrong)]
    start = forked.run if processes == 1 else subprocess.run
    done = start(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """The records of a run over the host backend."""
    return run(tmp_path_factory.mktemp("right"))


@pytest.mark.parametrize("backend", ["host", "xla", "nccl"])
def test_the_first_wrong_bit_is_named_on_every_backend(right, tmp_path, backend):
    if backend == "nccl" and not STAND_IN:
        pytest.skip("needs the stand-in for NCCL")
    wrong = run(tmp_path / "wrong", backend, wrong=(2, 1))
    found = jaxcomm.compare_runs(right, wrong)
    first = found.first
    assert (first.step, first.turn, first.rank) == (2, 1, {"i": 1})
    assert (first.site.name, first.site.collective) == ("ring_shift", "permute")
    assert (first.site.program, first.what) == ("jit_step", "operands")
    # All before are equal, whoever recorded them.
    assert 2 * CALLS < found.compared < 3 * CALLS
    assert found.skipped == ()
    assert str(found) == (
        "step 2, ring_shift over ('i',) number 0 of jit_step, turn 1: operands differ "
        "on {'i': 1}"
    )
    # As the others would say it.
    other = jaxcomm.compare_runs(wrong, right).first
    assert (other.step, other.turn, other.rank) == (2, 1, {"i": 1})


@pytest.mark.multiprocess
def test_processes_record_what_one_process_does(right, tmp_path):
    two = run(tmp_path / "two", processes=2, wrong=(2, 3))
    assert sorted(path.name for path in two.iterdir()) == [
        "checksums-0.jsonl",
        "checksums-1.jsonl",
    ]
    found = jaxcomm.compare_runs(right, two)
    assert (found.first.step, found.first.rank, found.skipped) == (2, {"i": 3}, ())
    assert 2 * CALLS < found.compared < 3 * CALLS
    (two / "checksums-1.jsonl").unlink()
    with pytest.raises(ValueError, match=r"step 0: nothing from processes \[1\] of 2"):
        jaxcomm.compare_runs(right, two)


def site_of(name="psum", ranks=2, **changes):
    replicated = name == "psum"
    collective = "all_reduce" if replicated else "all_to_all"
    site = {"program": "jit_f", "name": name, "axes": ("i",), "number": 0, "scope": ""}
    site |= {"collective": collective, "replicated": replicated, "mesh": {"i": ranks}}
    site |= {"operands": ("float32[4]",), "results": ("float32[4]",)}
    return site | changes


def write(folder, entries, sites=None, step=0, **changes):
    """Write a record by hand; an entry is (site, rank or [coordinates], two sums)."""
    folder.mkdir(exist_ok=True)
    document = {"version": 1, "step": step, "process": 0, "processes": 1, "start": "1"}
    document |= {"dropped": 0, "unrecorded": [], "sites": sites or [site_of()]}
    document["entries"] = [
        [site, at if isinstance(at, list) else [at], [operand], [result]]
        for site, at, operand, result in entries
    ]
    with (folder / "checksums-0.jsonl").open("a") as file:
        file.write(json.dumps(document | changes) + "\n")
    return folder


BOTH = [(0, 0, "a", "c"), (0, 1, "b", "c")]


@pytest.mark.parametrize(
    ("entries", "changes", "message"),
    [
        (BOTH, {"dropped": 1}, "step 0: 1 more calls than the 1048576 that are kept"),
        (BOTH[:1], {}, "psum over .* of jit_f: 1 of 2 ranks"),
        (BOTH + BOTH[:1], {}, "ended 2 times on some devices and 1 times on others"),
        (BOTH, {"processes": 2}, r"nothing from processes \[1\] of 2"),
        (BOTH, {"version": 2}, "line 1: not checksums of jaxcomm: .*version 2"),
        ([(1, 0, "a", "c")], {}, "line 1: not checksums of jaxcomm"),
        (BOTH, {"sites": [{}]}, "line 1: not checksums of jaxcomm"),
        (BOTH, {"step": 1}, r"one of the runs alone has steps \[0, 1\]"),
        ([], {"unrecorded": ["psum: left"]}, "nothing can be compared: psum: left"),
    ],
)
def test_records_that_lack_something_are_refused(tmp_path, entries, changes, message):
    whole = write(tmp_path / "whole", [] if "unrecorded" in changes else BOTH)
    lacks = write(tmp_path / "lacks", entries, **changes)
    for pair in ((whole, lacks), (lacks, whole)):
        with pytest.raises(ValueError, match=message):
            jaxcomm.compare_runs(*pair)


def test_a_run_that_is_not_there_or_was_cut_is_refused(tmp_path):
    whole = write(tmp_path / "whole", BOTH)
    with pytest.raises(ValueError, match="no checksums of a run are there"):
        jaxcomm.compare_runs(whole, tmp_path / "none")
    write(whole, BOTH)
    with pytest.raises(ValueError, match="line 2: its step was saved before"):
        load(whole)
    # A program that was started again, from the second of three steps.
    again = tmp_path / "again"
    for step, start, sums in (
        (0, "1", "x"),
        (1, "1", "y"),
        (2, "1", "z"),
        (1, "2", "w"),
    ):
        write(again, [(0, at, sums, "c") for at in (0, 1)], step=step, start=start)
    found = load(again).steps
    assert {step: {e.operands for e in found[step]} for step in found} == {
        0: {("x",)},
        1: {("w",)},
    }
    mixed = write(tmp_path / "mixed", BOTH)
    of_two = json.loads((mixed / "checksums-0.jsonl").read_text())
    of_two |= {"process": 1, "processes": 2}
    (mixed / "checksums-1.jsonl").write_text(json.dumps(of_two))
    with pytest.raises(ValueError, match=r"written by runs of \[1, 2\] processes"):
        load(mixed)
    cut = write(tmp_path / "cut", BOTH) / "checksums-0.jsonl"
    cut.write_text(cut.read_text()[:-20])
    with pytest.raises(ValueError, match="line 1: not checksums of jaxcomm"):
        load(cut.parent)


def test_runs_on_one_mesh_are_compared_in_all_they_have(tmp_path):
    whole = write(tmp_path / "whole", BOTH)
    two = [site_of(), site_of("all_to_all")]
    twice = [(0, 0, "a", "c"), (0, 1, "b", "c")]
    for name, entries, sites, said in (
        ("operand", [(0, 0, "a", "c"), (0, 1, "x", "c")], None,
         "psum over ('i',) number 0 of jit_f: operands differ on {'i': 1}"),
        ("result", [(0, 0, "a", "x"), (0, 1, "b", "c")], None,
         "psum over ('i',) number 0 of jit_f: results differ on {'i': 0}"),
        ("shape", BOTH, [site_of(operands=("float32[5]",))],
         "psum over ('i',) number 0 of jit_f: calls differ"),
        ("more", [*BOTH, (1, 0, "a", "c"), (1, 1, "a", "c")], two,
         "all_to_all over ('i',) number 0 of jit_f: calls differ"),
        ("twice", BOTH + twice, None,
         "psum over ('i',) number 0 of jit_f, turn 1: calls differ"),
    ):  # fmt: skip
        other = write(tmp_path / name, entries, sites)
        for pair in ((whole, other), (other, whole)):
            assert str(jaxcomm.compare_runs(*pair)) == f"step 0, {said}"


# What two runs of two steps called: the meshes of psum ("2", "4"), and of another
# program's ("e"), in either step; and the verdict. Meshes differ in size.
PAIRS = {
    "equal": ("2 2", "2 2", "all 2 calls"),
    "nothing in the second step": ("2 2", "2 -", "step 1, {psum}: calls differ"),
    "nothing at all": ("2 2", "- -", "step 0, {psum}: calls differ"),
    "a mesh more, equal": ("2,e2 2", "2,e2 2", "all 3 calls"),
    "a mesh more in one": ("2 2", "2,e4 2", "not compared: {eval}: one run alone"),
    "a mesh more that both have": ("2 2,e4", "2,e4 2,e4", "step 0, {eval}: calls diff"),
    "two sizes": ("2 2", "4 4", "all 2 calls"),
    "two sizes, one evaluates": ("2,e2 2", "4 4", "not compared: {eval}: one run alo"),
    "two sizes, evaluated on one": (
        "2,e2 2,e2",
        "4,e2 4",
        "step 1, {eval}: calls diff",
    ),
    "two sizes of one program": ("2,4 2", "2,4 2", "all 3 calls"),
    "two sizes, in one alone": ("2,4 2,4", "2,4 2", "step 1, {psum}: calls differ"),
    "three sizes": ("2,4 2", "8 8", "not compared: {psum}: called over several me"),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_each_call_is_compared_by_its_own_mesh(tmp_path, pair):
    *runs, said = pair
    for name, calls in zip("ab", runs, strict=True):
        for step, of_step in enumerate(calls.split()):
            sites, entries = [], []
            for call in of_step.replace("-", "").split(",") if of_step != "-" else ():
                ranks, number = int(call[-1]), len(sites)
                program = "jit_eval" if call[0] == "e" else "jit_f"
                sites.append(site_of(ranks=ranks, program=program))
                entries += [(number, at, f"{at}", "c") for at in range(ranks)]
            write(tmp_path / name, entries, sites, step=step)
    places = {"psum": "psum over ('i',) number 0 of jit_f"}
    places["eval"] = places["psum"].replace("_f", "_eval")
    for pair in ("ab", "ba"):
        text = str(jaxcomm.compare_runs(*(tmp_path / name for name in pair)))
        assert said.format(**places) in text


def test_what_a_run_could_not_record_is_no_difference(tmp_path):
    sites = [site_of(), site_of("all_to_all")]
    both = write(tmp_path / "both", [*BOTH, (1, 0, "a", "c"), (1, 1, "a", "c")], sites)
    why = "all_to_all over ('i',): JAX calls no host from this platform"
    one = write(tmp_path / "one", BOTH, unrecorded=[why])
    found = jaxcomm.compare_runs(both, one)
    assert (found.first, found.compared) == (None, 1)
    assert "one of the runs did not record it" in found.skipped[1]


def test_runs_on_meshes_of_two_sizes_are_compared_in_what_ranks_share(tmp_path):
    two = write(tmp_path / "two", BOTH)
    four = [(0, rank, f"{rank}", "c") for rank in range(4)]
    same = write(tmp_path / "same", four, [site_of(ranks=4)])
    assert str(jaxcomm.compare_runs(two, same)) == (
        "all 1 calls that were compared are equal"
    )
    # Also if one rank alone has another result.
    odd = write(tmp_path / "odd", [*four[:3], (0, 3, "3", "x")], [site_of(ranks=4)])
    found = jaxcomm.compare_runs(two, odd)
    assert (found.first.what, found.first.rank) == ("results", None)
    psum = "psum over ('i',) number 0 of jit_f"
    for name, entries, sites, said in (
        ("own", four, [site_of("all_to_all", 4)], None),
        ("shape", four, [site_of(ranks=4, results=("float32[2]",))],
         f"{psum}: results are ('float32[4]',) and ('float32[2]',)"),
        ("often", four + four, [site_of(ranks=4)],
         f"{psum}: called 1 and 2 times in a step"),
    ):  # fmt: skip
        other = write(tmp_path / name, entries, sites)
        with pytest.raises(ValueError, match="nothing can be compared") as caught:
            jaxcomm.compare_runs(two, other)
        assert said is None or said in str(caught.value)
    # Along an axis that the call does not name, devices are told apart.
    mesh = {"mesh": {"j": 2, "i": 2}}
    of_group = [(0, [j, i], "a", f"{j}") for j in range(2) for i in range(2)]
    one = write(tmp_path / "2x2", of_group, [site_of() | mesh])
    mesh = {"mesh": {"j": 2, "i": 1}}
    alone = [(0, [j, 0], "a", f"{j}") for j in range(2)]
    other = write(tmp_path / "2x1", alone, [site_of() | mesh])
    assert jaxcomm.compare_runs(one, other).first is None
    mesh = {"mesh": {"j": 1, "i": 2}}
    third = write(tmp_path / "1x2", of_group[:2], [site_of() | mesh])
    with pytest.raises(ValueError, match="differ in size along other axes"):
        jaxcomm.compare_runs(one, third)


@pytest.mark.parametrize(
    "dtype",
    [
        "bool", "int4", "uint8", "float8_e4m3fn", "bfloat16", "int16", "float32",
        "int64", "float64", "complex64", "complex128",
    ],
)  # fmt: skip
def test_one_changed_element_changes_both_halves(dtype):
    kind = ml_dtypes.int4 if dtype == "int4" else jnp.dtype(dtype)
    with jax.enable_x64(True):
        sums = jax.jit(lambda x: jnp.stack(checksum(x)))
        x = np.arange(12).reshape(3, 4).astype(kind)
        before = np.asarray(sums(x))
        for at in np.ndindex(3, 4):
            other = x.copy()
            other[at] = not x[at] if dtype == "bool" else 5 if x[at] != 5 else 6
            assert (np.asarray(sums(other)) != before).all(), at
        if np.dtype(kind).kind in "fc":
            assert (np.asarray(sums(-x)) != before).all()
            assert (np.asarray(sums(x * 0)) != np.asarray(sums(-x * 0))).all()
        swapped = x[:, ::-1]
        assert dtype == "bool" or (np.asarray(sums(swapped)) != before).all()
        assert not np.asarray(sums(x[:0])).any()


def test_what_is_off_adds_nothing_and_cannot_be_saved(make_mesh, tmp_path):
    mesh = make_mesh(i=2)

    def program(x):
        return jaxcomm.psum(x, "i")

    sharded = jax.shard_map(program, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P())
    text = jax.jit(sharded).lower(np.ones(2, np.float32)).as_text()
    assert "callback" not in text
    assert text.count("custom_call") == 1
    with pytest.raises(
        RuntimeError, match="Start the program with JAXCOMM_CHECKSUMS=1"
    ):
        jaxcomm.save_checksums(tmp_path, 0)


def test_calls_that_are_not_recorded_are_told(monkeypatch, make_mesh):
    monkeypatch.setattr(config, "CHECKSUMS", "1")
    monkeypatch.setattr(checksums, "_unrecorded", set())

    def program(x):
        return jaxcomm.psum(x, "i", backend="xla")

    specs = {"in_specs": jax.P("i"), "out_specs": jax.P(), "axis_names": {"i"}}
    sharded = jax.shard_map(program, mesh=make_mesh(i=2, j=2), **specs)
    text = jax.jit(sharded).lower(np.ones(2, np.float32)).as_text()
    assert "callback" not in text
    why = "psum over ('i',): shard_map leaves axes to XLA"
    assert checksums._unrecorded == {why}
    del specs["axis_names"]
    sharded = jax.shard_map(program, mesh=make_mesh(i=2, j=2), **specs)
    traced = jax.jit(sharded).trace(np.ones(2, np.float32))
    assert "callback" in traced.lower().as_text()
    assert checksums._unrecorded == {why}
    assert "callback" not in traced.lower(lowering_platforms=("tpu",)).as_text()
    other = "psum over ('i',): JAX calls no host from this platform"
    assert checksums._unrecorded == {why, other}


@pytest.fixture
def recording(monkeypatch):
    """Has this process record, from nothing."""
    monkeypatch.setattr(config, "CHECKSUMS", "1")
    monkeypatch.setattr(checksums, "_store", checksums._Store())
    monkeypatch.setattr(checksums, "_platforms", set())


def entries_of(path, line=-1):
    return len(json.loads(path.read_text().splitlines()[line])["entries"])


# Who comes ("p": psum over i, "q": the same of another program, "j": over j; then the
# devices of this process that hand over), and what the save makes of it: how many
# entries it writes, or None if it refuses and keeps them.
SAVES = {
    "nobody": [("", 0)],
    "all": [("p0123", 4), ("", 0)],
    "all, twice": [("p0123 p0123", 8)],
    "one is late, and comes": [("p012", None), ("p3", 4)],
    "one is late in a later call": [("p0123 q123", None), ("q0", 8)],
    "one is late in a later turn": [("p0123 p01 p2", None), ("p3", 8)],
    "one is late, and the others go on": [("p012 p012", None), ("p3 p3", 8)],
    "two refusals": [("p0", None), ("p12", None), ("p3", 4)],
    # Along an axis that a call does not name, ranks may go different ways.
    "one of two groups": [("j02", 2)],
    "a part of one of two groups": [("j02 j1", None), ("j3", 4)],
}


@pytest.mark.parametrize("steps", SAVES.values(), ids=SAVES)
def test_a_save_is_of_whole_calls_and_loses_nothing(
    recording, make_mesh, tmp_path, steps
):
    mesh = make_mesh(i=2, j=2)
    both = {"axes": ("i", "j"), "mesh": tuple(mesh.shape.items())}
    hand_over = {
        name: checksums.declare(checksums.Site(**site_of() | both | changes), mesh)
        for name, changes in (
            ("p", {}),
            ("q", {"program": "jit_g"}),
            ("j", {"axes": ("i",)}),
        )
    }
    for number, (came, saved) in enumerate(steps):
        for call, *devices in came.split():
            for device in map(int, devices):
                hand_over[call]([device // 2, device % 2, 2, 3, 4, 5])
        if saved is None:
            with pytest.raises(RuntimeError, match=r"times on some .* start it again"):
                jaxcomm.save_checksums(tmp_path, number)
        else:
            path = jaxcomm.save_checksums(tmp_path, np.int64(number))
            assert entries_of(path) == saved


def test_a_save_waits_for_what_was_launched(
    recording, monkeypatch, make_mesh, tmp_path
):
    """Also if nobody holds a result of it."""
    mesh, go, asked = make_mesh(i=2), threading.Event(), threading.Event()

    def held(x):
        waiting.event(go)
        return x

    def program(x):
        x = jax.pure_callback(held, x, x)
        return jaxcomm.psum(x, "i")

    sharded = jax.shard_map(
        program, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P(), check_vma=False
    )
    jax.jit(sharded)(np.ones(2, np.float32))
    wait = checksums._wait

    def waits():
        asked.set()
        wait()

    monkeypatch.setattr(checksums, "_wait", waits)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        saved = pool.submit(jaxcomm.save_checksums, tmp_path, 0)
        waiting.until(lambda: asked.is_set() or saved.done())
        go.set()
        assert entries_of(saved.result(waiting.HANG_SECONDS)) == 2


def test_what_is_written_in_vain_or_dropped_is_told(
    recording, monkeypatch, make_mesh, tmp_path
):
    monkeypatch.setattr(checksums, "MOST_ENTRIES", 3)
    site = checksums.Site(**site_of() | {"mesh": (("i", 2),)})
    hand_over = checksums.declare(site, make_mesh(i=2))
    for _ in range(2):
        hand_over([0, 2, 3, 4, 5])
        hand_over([1, 2, 3, 4, 5])
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        jaxcomm.save_checksums(tmp_path / "file" / "folder", 0)
    path = jaxcomm.save_checksums(tmp_path / "folder", 0)
    document = json.loads(path.read_text())
    assert (document["dropped"], len(document["entries"])) == (1, 3)
    sums = ["0000000200000003"], ["0000000400000005"]
    assert document["entries"][0] == [0, [0], *sums]
    with pytest.raises(ValueError, match="1 more calls than"):
        load(path.parent)
    path = jaxcomm.save_checksums(tmp_path / "folder", 1)
    document = json.loads(path.read_text().splitlines()[1])
    assert (document["dropped"], document["entries"]) == (0, [])
    for step, error in ((-1, ValueError), (True, TypeError), ("1", TypeError)):
        with pytest.raises(error, match="step must "):
            jaxcomm.save_checksums(tmp_path, step)
    monkeypatch.setattr(config, "CHECKSUMS", "yes")
    with pytest.raises(ValueError, match="JAXCOMM_CHECKSUMS must be 0 or 1, got 'yes'"):
        jaxcomm.save_checksums(tmp_path, 0)
