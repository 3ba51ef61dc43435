"""Checksums name the first collective at which two runs differ, and never say equal."""

import concurrent.futures
import json
import os
import pathlib
import sys
import threading

import forked
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import waiting
from checksums_by_hand import site_of

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
        command = [sys.executable, *forked.LAUNCH, f"-n{processes}"]
        command += [f"--devices-per-process={devices // processes}", str(PROGRAM)]
    command += [str(folder), backend, str(devices), *map(str, wrong)]
    done = forked.run(command, env=env, capture_output=True, text=True)
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
    found = jaxcomm.checksums.compare(right, wrong)
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
    other = jaxcomm.checksums.compare(wrong, right).first
    assert (other.step, other.turn, other.rank) == (2, 1, {"i": 1})


@pytest.mark.multiprocess
def test_processes_record_what_one_process_does(right, tmp_path):
    two = run(tmp_path / "two", processes=2, wrong=(2, 3))
    assert sorted(path.name for path in two.iterdir()) == [
        "checksums-0.jsonl",
        "checksums-1.jsonl",
    ]
    found = jaxcomm.checksums.compare(right, two)
    assert (found.first.step, found.first.rank, found.skipped) == (2, {"i": 3}, ())
    assert 2 * CALLS < found.compared < 3 * CALLS
    (two / "checksums-1.jsonl").unlink()
    with pytest.raises(ValueError, match=r"step 0: nothing from processes \[1\] of 2"):
        jaxcomm.checksums.compare(right, two)


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
        jaxcomm.checksums.save(tmp_path, 0)


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
                jaxcomm.checksums.save(tmp_path, number)
        else:
            path = jaxcomm.checksums.save(tmp_path, np.int64(number))
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
        saved = pool.submit(jaxcomm.checksums.save, tmp_path, 0)
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
        jaxcomm.checksums.save(tmp_path / "file" / "folder", 0)
    path = jaxcomm.checksums.save(tmp_path / "folder", 0)
    document = json.loads(path.read_text())
    assert (document["dropped"], len(document["entries"])) == (1, 3)
    sums = ["0000000200000003"], ["0000000400000005"]
    assert document["entries"][0] == [0, [0], *sums]
    with pytest.raises(ValueError, match="1 more calls than"):
        load(path.parent)
    path = jaxcomm.checksums.save(tmp_path / "folder", 1)
    document = json.loads(path.read_text().splitlines()[1])
    assert (document["dropped"], document["entries"]) == (0, [])
    for step, error in ((-1, ValueError), (True, TypeError), ("1", TypeError)):
        with pytest.raises(error, match="step must "):
            jaxcomm.checksums.save(tmp_path, step)
    monkeypatch.setattr(config, "CHECKSUMS", "yes")
    with pytest.raises(ValueError, match="JAXCOMM_CHECKSUMS must be 0 or 1, got 'yes'"):
        jaxcomm.checksums.save(tmp_path, 0)
