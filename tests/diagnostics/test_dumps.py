"""Records are written on a failure, on SIGUSR1, and when a program breaks off."""

import json
import os
import re
import signal
import subprocess
import sys

import forked
import pytest

import jaxcomm
from jaxcomm import config
from jaxcomm.diagnostics.merge import merge_files

# Rank 1 is held up: by wait() until a line arrives on stdin, by give_up() until the
# others have stopped waiting.
START = r"""
import os, signal, sys, time
import jax
import jax.numpy as jnp
import numpy as np
import jaxcomm

mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,),
                     devices=jax.devices()[:4])


def jitted(call):
    spec = jax.P("i")
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec,
                                 check_vma=False))


program = jitted(lambda x: jaxcomm.psum(x, "i"))
x = jnp.arange(4.0)


def wait(i):
    if int(i) == 1:
        sys.stdin.readline()
    return np.float32(0)


def give_up(i):
    if int(i) == 1:
        until_others_have("failed")
    return np.float32(0)


def until_others_have(state):
    others = []
    while others != [0, 2, 3]:
        time.sleep(0.005)
        (communicator,) = jaxcomm.flight_record().process.communicators
        last = max((e.sequence for e in communicator.entries if e.rank == 1), default=0)
        others = sorted(entry.rank for entry in communicator.entries
                        if entry.sequence == last + 1 and entry.state == state)


def held_up(by):
    def call(x):
        late = jax.pure_callback(by, jax.ShapeDtypeStruct((), np.float32),
                                 jax.lax.axis_index("i"))
        return jaxcomm.all_gather(x + late, "i", tiled=True)

    return jitted(call)


def fail():
    try:
        jax.block_until_ready(held_up(give_up)(x))
    except jax.errors.JaxRuntimeError as error:
        return str(error)


def dumps():
    return sorted(os.listdir(os.environ["JAXCOMM_DUMP_DIR"]))

"""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "dumps"


@pytest.fixture
def start(folder):
    """Returns ``start(code)``: a process with pipes, killed in the end."""
    started = []

    def start(code, **environment):
        environment = {"JAXCOMM_DUMP_DIR": str(folder)} | environment
        process = forked.Popen(
            [sys.executable, "-c", START + code],
            env=os.environ | {"JAXCOMM_TIMEOUT": "200"} | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def finish(start):
    """Returns ``finish(code)``: runs it to its end; returns status, stdout, stderr."""

    def finish(code, **environment):
        process = start(code, **environment)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    return finish


HANG = r"""
jax.block_until_ready(program(x))
out = held_up(wait)(x)
until_others_have("started")
print("hangs", flush=True)
print(np.asarray(jax.block_until_ready(out))[:4])
"""


def test_a_process_that_hangs_in_block_until_ready_answers_the_signal(start, folder):
    process = start(HANG)
    assert process.stdout.readline() == "hangs\n"
    process.send_signal(signal.SIGUSR1)
    # Written after the file.
    line = process.stderr.readline()
    path = folder / "flight-record-0.json"
    assert line == (
        f"jaxcomm: process 0 of 1: flight record: {path}; explained by python -m "
        f"jaxcomm.doctor --merge {path}\n"
    )
    merged = merge_files([path])
    assert merged.records[0].reason == "signal"
    assert [finding.text for finding in merged.findings] == [
        "rank 1 (process 0, cpu:1) last completed psum(float32[1]) #1; ranks 0, 2, 3 "
        "wait in all_gather(float32[1]) #2"
    ]
    # It goes on as if nothing had been.
    out, err = process.communicate("\n", timeout=120)
    assert (process.returncode, out, err) == (0, "[0. 1. 2. 3.]\n", "")


def test_without_a_folder_the_answer_is_a_line_for_each_rank(start, folder):
    process = start(HANG, JAXCOMM_DUMP_DIR="")
    assert process.stdout.readline() == "hangs\n"
    process.send_signal(signal.SIGUSR1)
    lines = [process.stderr.readline() for _ in range(5)]
    assert lines[0] == (
        "jaxcomm: process 0 of 1: last operations (JAXCOMM_DUMP_DIR is not set, so no "
        "file):\n"
    )
    where = r"  axes \('i',\), lane 'default': rank {} of 4 \(cpu:{}\) "
    waits = r"has been in all_gather\(float32\[1\]\) #2 for [0-9.]+ s\n"
    done = r"completed psum\(float32\[1\]\) #1 [0-9.]+ s ago\n"
    for rank, line in enumerate(lines[1:]):
        assert re.fullmatch(
            where.format(rank, rank) + (done if rank == 1 else waits), line
        )
    _, err = process.communicate("\n", timeout=120)
    assert (process.returncode, err) == (0, "")
    assert not folder.exists()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_handler_of_the_program_stays_its_own(finish, when):
    own = "signal.signal(signal.SIGUSR1, lambda *_: print('mine', flush=True))\n"
    make = "jaxcomm.init(mesh)\n"
    code = own + make if when == "before" else make + own
    status, out, err = finish(
        code + "os.kill(os.getpid(), signal.SIGUSR1); print(dumps())"
    )
    assert (status, out, err) == (0, "mine\n[]\n", "")


def test_a_timeout_is_dumped_once_before_the_program_is_told(finish, folder):
    # Nothing went well between the first two: one and the same trouble.
    status, out, err = finish(
        "first = fail()\n"
        "print(dumps())\n"
        "os.remove(os.path.join(os.environ['JAXCOMM_DUMP_DIR'], dumps()[0]))\n"
        "again = fail()\n"
        "print('DEADLINE' in first, 'DEADLINE' in again, dumps())\n"
        "jax.block_until_ready(program(x))\n"
        "fail()\n"
        "print(dumps())",
        JAXCOMM_TIMEOUT="2",
    )
    assert status == 0, err
    dumped = "['flight-record-0.json']"
    assert out.splitlines() == [dumped, "True True []", dumped]
    begin = "jaxcomm: process 0 of 1: a collective failed (timeout); flight record: "
    ours = [line for line in err.splitlines() if line.startswith("jaxcomm:")]
    assert [line.startswith(begin) for line in ours] == [True, True]
    merged = merge_files([folder / "flight-record-0.json"])
    assert merged.records[0].reason == "timeout"
    (finding,) = merged.findings
    assert (finding.kind, finding.ranks) == ("behind", (1,))
    assert finding.text.startswith(
        "rank 1 (process 0, cpu:1) last completed psum(float32[1]) #3; ranks 0, 2, 3 "
    )
    # Written before or after the operation was marked as failed.
    assert re.search(r"(wait|gave up) in all_gather\(float32\[1\]\) #4$", finding.text)


def test_without_a_folder_a_failure_says_once_how_to_get_a_record(finish):
    status, _, err = finish(
        "fail(); jax.block_until_ready(program(x)); fail()",
        JAXCOMM_TIMEOUT="2",
        JAXCOMM_DUMP_DIR="",
    )
    assert status == 0, err
    ours = [line for line in err.splitlines() if line.startswith("jaxcomm:")]
    assert ours == [
        "jaxcomm: process 0 of 1: a collective failed (timeout). Set "
        "JAXCOMM_DUMP_DIR=<folder> to have every process write its last operations "
        "there when that happens."
    ]


def test_a_record_that_cannot_be_written_is_told_in_a_line(finish, folder):
    status, _, err = finish(
        "jaxcomm.init(mesh); os.rmdir(os.environ['JAXCOMM_DUMP_DIR']); fail()",
        JAXCOMM_TIMEOUT="2",
    )
    assert status == 0, err
    assert (
        f"cannot write the flight record to {folder}/flight-record-0.json: No such "
        f"file or directory; see JAXCOMM_DUMP_DIR\n" in err
    )


@pytest.mark.parametrize(
    ("ending", "status", "dumped"),
    [
        ("", 0, False),
        ("sys.exit(3)", 3, False),
        ("raise KeyError('mine')", 1, True),
    ],
)
def test_a_program_that_breaks_off_leaves_its_record(
    finish, folder, ending, status, dumped
):
    found, _, err = finish(f"jax.block_until_ready(program(x))\n{ending}")
    assert found == status, err
    paths = list(folder.iterdir())
    assert [path.name for path in paths] == ["flight-record-0.json"] * dumped
    if dumped:
        document = json.loads(paths[0].read_text())
        assert document["reason"] == "exit after failure"
        assert "jaxcomm: process 0 of 1: it ends by an exception; flight reco" in err
        (communicator,) = document["communicators"]
        assert [entry["name"] for entry in communicator["entries"]] == ["psum"] * 4


def test_a_broken_off_program_without_a_folder_says_nothing_of_records(finish):
    status, _, err = finish(
        "jaxcomm.init(mesh); raise KeyError('mine')", JAXCOMM_DUMP_DIR=""
    )
    assert status == 1
    assert "jaxcomm:" not in err


# The variable


def test_the_folder_is_made_and_its_path_absolute(monkeypatch, tmp_path, make_mesh):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXCOMM_DUMP_DIR", "a/b")
    assert config.dump_dir() == str(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    monkeypatch.setenv("JAXCOMM_DUMP_DIR", "")
    assert config.dump_dir() is None


def test_a_folder_that_cannot_be_is_refused_when_a_communicator_is_made(
    monkeypatch, tmp_path, make_mesh
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXCOMM_DUMP_DIR", str(tmp_path / "file" / "dumps"))
    with pytest.raises(
        ValueError, match=r"JAXCOMM_DUMP_DIR is '.*dumps': Not a directory"
    ):
        jaxcomm.init(make_mesh(i=2))
    assert len(jaxcomm.communicators()) == 0
