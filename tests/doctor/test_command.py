"""``python -m jaxcomm.doctor``."""

import json
import os
import sys

import forked
import pytest
import waiting

from jaxcomm.doctor import __main__ as doctor
from jaxcomm.doctor import options

RECORD = {
    "version": 1, "process": 0, "processes": 2, "pid": 1, "host": "node7",
    "time": 1_700_000_009.0, "reason": "timeout", "devices": {"cpu": [0]},
    "communicators": [{
        "key": "1f", "axes": "('i',)", "lane": "default", "backend": "host",
        "platform": "cpu", "groups": [[0, 2048]], "timeout_seconds": 300.0,
        "entries": [{
            "sequence": 1, "rank": 0, "group": 0, "device": 0, "run_id": 1, "site": "a",
            "collective": "all_reduce", "name": "psum", "operands": "float32[4]",
            "dtype": "float32", "bytes": 16, "state": "failed",
            "started": 1_700_000_000.0, "seconds": 8.0,
        }],
    }],
}  # fmt: skip


@pytest.fixture
def command():
    # The doctor would complain of the tests' variables.
    others = {n: v for n, v in os.environ.items() if not n.startswith("JAXCOMM_")}

    def run(*arguments, **environment):
        return forked.run(
            [sys.executable, "-m", "jaxcomm.doctor", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=waiting.HANG_SECONDS,
            env=others | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""} | environment,
        )

    return run


@pytest.fixture
def record(tmp_path):
    (tmp_path / "flight-record-0.json").write_text(json.dumps(RECORD))
    return tmp_path / "flight-record-0.json"


@pytest.fixture
def here(capsys):
    def run(*words):
        return doctor.main(options.read([*map(str, words)])), *capsys.readouterr()

    return run


def test_it_prints_what_it_finds(command):
    done = command(JAXCOMM_TIMEOUT="77")
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("jaxlib", "1 x cpu", "huge pages", "/dev/shm", "no problem"):
        assert word in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "JAXCOMM_TIMEOUT" in line]
    assert line.split() == ["JAXCOMM_TIMEOUT", "77"]
    # A pipe has no width to fill.
    assert [line for line in done.stdout.splitlines() if line != line.rstrip()] == []


def test_json_is_json_and_tells_what_is_wrong(command, tmp_path):
    nccl = str(tmp_path / "libnccl.so")
    done = command("--json", JAXCOMM_TIMEOUT="never", JAXCOMM_NCCL_LIBRARY=nccl)
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    assert {"versions", "machine"} < set(found)
    for problem in (
        "JAXCOMM_TIMEOUT is 'never'",
        f"backends: nccl: unavailable: NCCL cannot be loaded: {nccl}: ",
    ):
        assert any(problem in each for each in found["problems"])


def test_records_are_merged_and_written_for_viewers(here, record, tmp_path):
    status, out, err = here("--merge", record)
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == (
        "  group 0: rank 1 (process 1, cpu:2048) left no record; rank 0 (process 0, "
        "cpu:0) gave up in psum(float32[4]) #1"
    )
    assert [line for line in out.splitlines() if line != line.rstrip()] == []
    _, out, _ = here("--merge", record, "--json")
    assert json.loads(out)["missing"] == [1]
    trace = tmp_path / "trace.json"
    status, _, err = here("--merge", record, "--trace", trace)
    assert (status, err) == (0, "")
    events = json.loads(trace.read_text())["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X"] == ["psum (failed)"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--merge no/such.json", "no/such.json: No such file or directory"),
        (f"--merge {__file__}", f"{__file__}: not JSON"),
        ("--merge RECORD --trace no/trace.json", "No such file or directory"),
    ],
)
def test_what_cannot_be_read_or_written_is_status_two(here, record, words, text):
    status, _, err = here(*words.replace("RECORD", str(record)).split())
    assert (status, err.count("\n")) == (2, 1)
    assert text in err


@pytest.mark.thorough
def test_collectives_are_checked_and_timed(command):
    done = command("--check", "--devices", "3", JAXCOMM_BACKEND="xla")
    assert (done.returncode, done.stderr) == (0, "")
    first, _, head, _, *lines, _, last = done.stdout.splitlines()
    told = "3 x cpu, served by the backend 'xla': XLA's own collectives are compared"
    assert first.startswith(told)
    assert head.split("  ")[0] == "collective"
    assert len(lines) == 2 * 17
    assert all(line.split()[3] == "right" for line in lines)
    assert last == "34 of 34 right"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--merge", "--merge: no file was given"),
        ("record.json", "'record.json' goes with --merge"),
        ("--bogus", "unrecognized arguments: --bogus"),
        ("--check --devices 1", "'1' is not a number from 2 to 256"),
        ("--check --merge x.json", "--check and --merge exclude each other"),
        ("--devices 4", "--devices goes with --check"),
        ("--trace x.json", "--trace goes with --merge"),
    ],
)
def test_a_bad_command_line_is_refused(words, text):
    with pytest.raises(options.UsageError, match=f"^.*{text}") as raised:
        options.read(words.split())
    assert "\n" not in str(raised.value)


def test_what_cannot_be_done_ends_with_status_two(command):
    done = command("--check")
    assert (done.returncode, done.stdout) == (2, "")
    assert "JAX finds one device (cpu), and collectives need two" in done.stderr
    assert done.stderr.count("\n") == 1
