"""Records are written on a failure, on SIGUSR1, and when a program breaks off.

When one failure follows another, what is dumped, and what signal handlers stay: see
tests/ffi/flight_dump_test.cc.
"""

import json
import os
import re
import signal
import sys

import pytest
import waiting

import jaxcomm
from jaxcomm import config

# Rank 1 is held up until a line arrives on stdin, or, on lane "late", until the others
# have given up.
START = r"""
from worker import *

mesh, folder = mesh_of(jax.devices()[:4]), os.environ["JAXCOMM_DUMP_DIR"]
program, x = jitted(lambda x: jaxcomm.psum(x, "i"), mesh), spread(mesh)


def others_have(state):
    entries = jaxcomm.flight_record().process.communicators[-1].entries
    last = max((e.sequence for e in entries if e.rank == 1), default=0)
    return {0, 2, 3} == {entry.rank for entry in entries
                         if entry.sequence == last + 1 and entry.state == state}


def held_up(until, lane):
    def late(i):
        if int(i) == 1:
            until()
        return np.float32(0)

    def call(x):
        zero = jax.pure_callback(late, jax.ShapeDtypeStruct((), np.float32),
                                 jax.lax.axis_index("i"))
        return jaxcomm.all_gather(x + zero, "i", tiled=True, lane=lane)

    return jitted(call, mesh)


def fail():
    until = lambda: waiting.until(lambda: others_have("failed"))
    try:
        jax.block_until_ready(held_up(until, "late")(x))
    except jax.errors.JaxRuntimeError as error:
        return "DEADLINE" in str(error)

"""
HANG = r"""
jax.block_until_ready(program(x))
out = held_up(sys.stdin.readline, None)(x)
waiting.until(lambda: others_have("started"))
print("hangs", flush=True)
print(np.asarray(jax.block_until_ready(out))[:4, 0])
"""


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "dumps"


@pytest.fixture
def start(folder, piped):
    def start(code, dump_dir=str(folder)):
        own = {"JAXCOMM_TIMEOUT": str(waiting.HANG_SECONDS)}
        env = os.environ | own | {"JAXCOMM_DUMP_DIR": dump_dir}
        return piped(["-c", START + code], env=env)

    return start


@pytest.fixture
def finish(start):
    def finish(*args, **options):
        process = start(*args, **options)
        out, err = waiting.ended(process)
        return process.returncode, out, err

    return finish


def test_a_process_that_hangs_in_block_until_ready_answers_the_signal(start, folder):
    """With a line for each rank where there is no folder; test_processes.py has one."""
    process = start(HANG, dump_dir="")
    assert process.stdout.readline() == "hangs\n"
    process.send_signal(signal.SIGUSR1)
    lines = [process.stderr.readline() for _ in range(5)]
    assert lines[0] == (
        "jaxcomm: process 0 of 1: last operations (JAXCOMM_DUMP_DIR is not set, so no "
        "file):\n"
    )
    waits = r"has been in all_gather\(float32\[1,1\]\) #2 for [0-9.]+ s\n"
    done = r"completed psum\(float32\[1,1\]\) #1 [0-9.]+ s ago\n"
    for rank, line in enumerate(lines[1:]):
        where = rf"  axes \('i',\), lane 'default': rank {rank} of 4 \(cpu:{rank}\) "
        assert re.fullmatch(where + (done if rank == 1 else waits), line)
    # And what its threads of Python do.
    assert "(most recent call first):" in process.stderr.readline()
    # It goes on as if nothing had been.
    out, err = waiting.ended(process, "\n")
    assert (process.returncode, out, err) == (0, "[0. 1. 2. 3.]\n", "")
    assert not folder.exists()


def test_stacks_are_read_though_a_thread_keeps_the_lock_of_the_interpreter(start):
    process = start(
        "jax.block_until_ready(program(x))\n"
        "import itertools, signal\n"
        # From within: a signal before the sum would find the lock free.
        "first = (os.kill(os.getpid(), signal.SIGUSR1) or 0 for _ in '1')\n"
        "sum(itertools.chain(first, range(10**12)))",
        dump_dir="",
    )
    said = []
    while not said or "keeps the interpreter's lock" not in said[-1]:
        said.append(process.stderr.readline())
        assert said[-1], said
    has_stacks = re.search(r'File "<string>", line \d+ in <module>', "".join(said))
    # From 3.13 on Python has no function that reads them without the lock.
    assert bool(has_stacks) == (sys.version_info < (3, 13))
    process.kill()


def test_a_failure_says_why_it_leaves_no_record(finish, folder):
    """Of one that leaves it: test_processes.py."""
    status, out, err = finish(
        "jaxcomm.init(mesh, lanes='late', timeout=waiting.EXPIRES_SECONDS)\n"
        "os.rmdir(folder)\n"
        "print(fail())"
    )
    assert (status, out) == (0, "True\n"), err
    (line,) = (line for line in err.splitlines() if line.startswith("jaxcomm:"))
    assert line.startswith("jaxcomm: process 0 of 1: a collective failed (timeout)")
    assert (
        f"cannot write the flight record to {folder}/flight-record-0.json: No such "
        f"file or directory; see JAXCOMM_DUMP_DIR" in line
    )


def test_a_program_that_breaks_off_leaves_its_record(finish, folder):
    status, _, err = finish("jax.block_until_ready(program(x))\nraise KeyError('mine')")
    assert status == 1
    assert "jaxcomm: process 0 of 1: it ends by an exception; flight reco" in err
    (path,) = folder.iterdir()
    assert path.name == "flight-record-0.json"
    document = json.loads(path.read_text())
    assert document["reason"] == "exit after failure"
    (communicator,) = document["communicators"]
    assert [entry["name"] for entry in communicator["entries"]] == ["psum"] * 4


def test_the_folder_is_made_and_its_path_absolute(monkeypatch, tmp_path, make_mesh):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXCOMM_DUMP_DIR", "a/b")
    assert config.dump_dir() == str(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    monkeypatch.setenv("JAXCOMM_DUMP_DIR", "")
    assert config.dump_dir() is None
    # One that cannot be is refused when a communicator is made.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXCOMM_DUMP_DIR", str(tmp_path / "file" / "dumps"))
    text = r"JAXCOMM_DUMP_DIR is '.*dumps': Not a directory"
    with pytest.raises(ValueError, match=text):
        jaxcomm.init(make_mesh(i=2))
    assert len(jaxcomm.communicators()) == 0
