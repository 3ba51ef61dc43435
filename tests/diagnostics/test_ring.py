"""The library that NCCL loads, called in the order in which NCCL calls it.

The order is as NCCL 2.28.9 was seen to call on two GPUs: the group, the collective, the
launch, then the GPU's events from another thread.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import waiting

import jaxcomm
from jaxcomm.diagnostics import of_nccl, programs, ring
from jaxcomm.diagnostics.files import merge_files
from jaxcomm.diagnostics.programs import Call
from jaxcomm.diagnostics.record import RecordError
from jaxcomm.diagnostics.seen import Seen
from jaxcomm.doctor import __main__ as doctor
from jaxcomm.doctor import options
from jaxcomm.launch import watch

LIBRARY = pathlib.Path(jaxcomm.__file__).parent / "libjaxcomm_watch.so"


def script(text, folder, process, processes=2, **variables):
    """Runs calls in a process of its own, which then dies without a word."""
    program = (
        f"from nccl_calls import *\nimport signal\n{text}\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = os.environ | {
        "JAXCOMM_WATCH_DIR": str(folder),
        "WATCH_LIBRARY": str(LIBRARY),
        "JAX_PROCESS_ID": str(process),
        "JAX_NUM_PROCESSES": str(processes),
        "PYTHONPATH": str(pathlib.Path(__file__).parent),
        **variables,
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stderr


STEP = """
n = Nccl({version})
c = n.join({process}, 2)
assert n.mask.value == 0x46
ours = n.join({process}, 2, b"jaxcomm", 77)
assert n.mask.value == 0x46
for turn in range({turns}):
    n.run(ours, n.enqueue(ours, b"AllReduce"))
    n.run(c, n.enqueue(c, b"AllReduce"))
"""
LAST = 'h = n.enqueue(c, b"AllGather", 9)\n'
CASES = {
    "not enqueued": ("", "last completed all-reduce #300"),
    "enqueued, and its GPU has not begun": (LAST, "last completed all-reduce #300"),
    "another shape": (
        'n.run(c, n.enqueue(c, b"AllGather", 7), ends=False)',
        "all-gather(float32[7])",
    ),
}


def write_programs(file):
    """What the process of a file of NCCL's compiled: sums, then a gather."""
    calls = [
        Call(name=name, kind=kind, sizes=(("float32", count, size),), groups=None)
        for name, kind, count, size in (
            ("sum, train.py:8", "allred", 256, 1024),
            ("gather, train.py:9", "allgat", 9, 36),
        )
    ]
    found = ring.load(file)
    line = programs.to_json(("seq", ("loop", calls[0]), calls[1]), [0, 1])
    path = file.with_suffix(programs.SUFFIX)
    path.write_text(f"{programs.head(found.pid)}\n{line}\n")


@pytest.mark.parametrize(
    ("case", "version"),
    [*((case, 5) for case in CASES), ("not enqueued", 4), ("not enqueued", 6)],
)
def test_who_does_not_come_is_named(case, version, tmp_path):
    text, expected = CASES[case]
    step = STEP.format(version=version, process=0, turns=300)
    script(f"{step}{LAST}n.run(c, h, ends=False)", tmp_path, 0)
    step = STEP.format(version=version, process=1, turns=300)
    script(step + text, tmp_path, 1)
    files = sorted(tmp_path.glob(ring.PATTERN))
    for file in files:
        write_programs(file)
    merged = merge_files(files)
    assert "last completed all-reduce #300 (sum, train.py:8)" in merged.suspect
    assert len(merged.groups) == 1  # ours are not told a second time
    assert expected in str(merged)
    notes = of_nccl.notes([ring.load(file) for file in files], {})
    assert notes[0] == (
        "process 0: all-gather #301, which its GPU has begun and not ended"
    )
    if case == "enqueued, and its GPU has not begun":
        assert notes[1] == (
            "process 1: all-gather #301, which its GPU has not begun, though it is "
            "enqueued"
        )
    if case != "another shape":
        assert merged.suspect.startswith("suspect: process 1 ")
        waits = "process 0 waits in all-gather #301 (gather, train.py:9) for "
        assert waits in merged.suspect
    else:
        # It is in none of its programs.
        assert ", and it came to all-gather(float32[7]) #301 instead" in merged.suspect


def test_without_events_of_the_gpu_who_enqueued_less_is_named(tmp_path):
    step = STEP.replace("0x46", "0x6").replace("n.run(c, n.enq", "(c, n.enq")
    for process in range(2):
        script(
            step.format(version=5, process=process, turns=300 - 5 * process),
            tmp_path,
            process,
            JAXCOMM_WATCH_KERNELS="0",
        )
    merged = merge_files(sorted(tmp_path.glob(ring.PATTERN)))
    assert merged.suspect.startswith("suspect: process 1 ")
    assert "last completed all-reduce #295" in merged.suspect
    assert "all-reduce #296" in merged.suspect


# A GPU's copy to itself is counted by the GPU alone. So the next sum seems to have
# ended though it has not begun, as NCCL 2.28.9 was seen to tell on two H100s.
ALL_TO_ALL = STEP + "n.run(c, n.send(c, 1 - {process}), channels=3)\n"
EARLY = ALL_TO_ALL + 'n.run(c, n.enqueue(c, b"AllReduce"))'


class Waiting:
    """A launcher's witness of processes whose main threads all wait, or one works."""

    def __init__(self, states="SS"):
        self.states = states

    def seen(self):
        return [
            Seen(process=n, pid=n, host="", state=state, call="futex_wait")
            for n, state in enumerate(self.states)
        ]


@pytest.mark.parametrize("late", [0, 1, None])
def test_what_gpus_tell_after_an_all_to_all_is_not_believed(late, tmp_path):
    clock = waiting.Clock()
    looks = watch.NcclWatch(tmp_path, 60.0, clock.monotonic)
    for process in range(2):
        text = ALL_TO_ALL if process == late else EARLY
        script(text.format(version=5, process=process, turns=3), tmp_path, process)
    files = sorted(tmp_path.glob(ring.PATTERN))
    assert of_nccl.notes([ring.load(file) for file in files], {}) == []
    assert looks.look(Waiting()) is None  # these are news
    clock.advance(61.0)
    if late is None:
        assert looks.look(Waiting("SR")) is None  # it may compute
        clock.advance(61.0)
        held = looks.look(Waiting())
        assert held.process is None
        assert held.may_go_on
        assert "cannot tell: all have enqueued all-reduce #4" in held.how
    else:
        assert looks.look(Waiting()).process == late
        assert "last completed all-reduce #3" in merge_files(files).suspect
    clock.advance(61.0)
    assert looks.look(Waiting()) is None  # it was told


def test_the_doctor_reads_them_beside_flight_records(tmp_path, capsys):
    for process, turns in enumerate([3, 2]):
        step = STEP.format(version=5, process=process, turns=turns)
        script(step, tmp_path, process)
    ours = {
        "key": "1f", "axes": "('i',)", "lane": "default", "backend": "nccl",
        "platform": "cuda", "groups": [[0, 1]], "timeout_seconds": 300.0,
        "entries": [
            {"sequence": 7, "rank": 0, "group": 0, "device": 0, "run_id": 1,
             "site": "a", "collective": "all_reduce", "name": "psum",
             "operands": "float32[4]", "dtype": "float32", "bytes": 16,
             "state": "started", "started": 1_700_000_000.0, "seconds": None},
        ],
    }  # fmt: skip
    own = tmp_path / "flight-record-0.json"
    document = {
        "version": 1, "process": 0, "processes": 2, "pid": 1, "host": "node7",
        "time": 1_700_000_009.0, "reason": "signal", "devices": {"cuda": [0]},
        "communicators": [ours],
    }  # fmt: skip
    own.write_text(json.dumps(document))
    trace = tmp_path / "trace.json"
    words = ["--merge", *map(str, tmp_path.glob("*.ring")), str(own)]
    assert doctor.main(options.read(words)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("psum(float32[4]) #7") >= 1
    assert "enqueued" not in out
    # Ours once, though NCCL told of its sums, too; and what XLA did.
    assert "flight records of 2 of 2 processes (signal: 0; nccl: 1)" in out
    assert doctor.main(options.read([*words, "--trace", str(trace)])) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    names = [each["name"] for each in events if each["ph"] == "X"]
    assert sum("psum" in name for name in names) == 1
    assert sum("all-reduce" in name for name in names) == 5


def test_all_that_completed_is_no_finding(tmp_path):
    for process in range(2):
        step = STEP.format(version=5, process=process, turns=5)
        script(f"{step}n.finalize(c)", tmp_path, process)
    merged = merge_files(sorted(tmp_path.glob(ring.PATTERN)))
    assert not merged.findings
    assert all(group.communicator.closed for group in merged.groups)


def test_a_torn_operation_is_left_out_and_a_torn_file_refused(tmp_path):
    script(STEP.format(version=5, process=0, turns=3), tmp_path, 0)
    path = tmp_path / "nccl-0.ring"
    content = bytearray(path.read_bytes())
    second = 4096 + 128 + 64
    content[second : second + 8] = bytes(8)  # as while it is written
    (block,) = ring.parse(bytes(content)).blocks
    assert [each.number for each in block.operations] == [1, 3]
    content[second : second + 8] = (99).to_bytes(8, "little")
    assert [o.number for o in ring.parse(bytes(content)).blocks[0].operations] == [1, 3]
    path.write_bytes(content[:5000])
    with pytest.raises(RecordError, match=r"nccl-0\.ring: a damaged .*: 5000 bytes"):
        ring.load(path)


def test_what_the_ring_loses_while_it_is_read_is_left_out(tmp_path):
    keep = f"pathlib.Path({str(tmp_path)!r}, 'nccl-0.ring')"
    step = STEP.format(version=5, process=0, turns=300)
    script(
        f"import pathlib\n{step}before = {keep}.read_bytes()\n"
        'for turn in range(20):\n    n.enqueue(c, b"AllGather", 9)\n'
        f"{keep}.with_name('before').write_bytes(before)\n",
        tmp_path,
        0,
    )
    before = (tmp_path / "before").read_bytes()
    after = (tmp_path / "nccl-0.ring").read_bytes()

    def torn(numbers, rest):
        found = bytearray(numbers)
        for place in range(256):
            at = 4096 + 128 + 64 * place + 8
            found[at : at + 56] = rest[at : at + 56]
        return bytes(found)

    # The numbers of then, and the rest of now.
    (block,) = ring.parse(torn(before, after), after).blocks
    assert [each.number for each in block.operations] == [*range(65, 301)]
    assert {each.collective for each in block.operations} == {"allred"}
    assert {each.order for each in block.operations} == {*range(65, 301)}
    # The numbers of now, and the rest of then: memory is copied in any order.
    (block,) = ring.parse(torn(after, before), after).blocks
    assert [each.number for each in block.operations] == [*range(65, 301)]
    # Another communicator has taken the block meanwhile.
    other = bytearray(after)
    other[4096] ^= 1
    assert not ring.parse(torn(before, after), bytes(other)).blocks


def test_a_disk_without_room_ends_no_program(tmp_path):
    said = script(
        "import resource\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        'n = Nccl(5)\nc = n.join(0, 2)\nn.run(c, n.enqueue(c, b"AllReduce"))\n'
        "assert n.mask.value == 0",
        tmp_path,
        0,
    )
    assert "jaxcomm: NCCL is not watched: no file for its records" in said
    assert not list(tmp_path.iterdir())


def test_nothing_grows(tmp_path):
    turns = 2_000
    script(STEP.format(version=5, process=0, turns=turns), tmp_path, 0)
    (block,) = ring.load(tmp_path / "nccl-0.ring").blocks
    assert block.count == turns
    assert [o.order for o in block.operations] == [*range(turns - 255, turns + 1)]
    assert (tmp_path / "nccl-0.ring").stat().st_size == ring.BYTES
