"""``python -m jaxcomm.doctor``."""

import json
import os
import socket
import sys

import forked
import matplotlib as mpl
import matplotlib.pyplot as plt
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
    """Returns a function that runs ``python -m jaxcomm.doctor`` to its end."""

    def run(*arguments, **environment):
        return forked.run(
            [sys.executable, "-m", "jaxcomm.doctor", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=waiting.HANG_SECONDS,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""} | environment,
        )

    return run


@pytest.fixture
def record(tmp_path):
    path = tmp_path / "flight-record-0.json"
    path.write_text(json.dumps(RECORD))
    return str(path)


@pytest.fixture
def here(capsys):
    """Returns a function that runs the command in this process: status and output."""

    def run(*words):
        status = doctor.main(options.read([*map(str, words)]))
        out, err = capsys.readouterr()
        return status, out, err

    return run


def test_it_prints_what_it_finds(command):
    done = command(JAXCOMM_TIMEOUT="77")
    # Some systems forbid processes to share memory, which is a problem.
    found_none = "no problem was found" in done.stdout
    assert (done.returncode, done.stderr) == (0 if found_none else 1, "")
    for word in ("jaxlib", "1 x cpu", "reduction kernels", "boot id", "pidfd_open"):
        assert word in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "JAXCOMM_TIMEOUT" in line]
    assert line.split() == ["JAXCOMM_TIMEOUT", "77"]
    # A pipe has no width to fill.
    assert [line for line in done.stdout.splitlines() if line != line.rstrip()] == []


def test_json_is_json_and_tells_what_is_wrong(command, tmp_path):
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as other:
        nobody = f"127.0.0.1:{other.getsockname()[1]}"
    done = command(
        "--json",
        JAXCOMM_TIMEOUT="never",
        NCCL_RAS_ADDR=nobody,
        JAXCOMM_BACKEND="mpi",
        JAXCOMM_NCCL_LIBRARY=str(tmp_path / "libnccl.so"),
        JAXCOMM_DUMP_DIR=str(tmp_path / "file" / "dumps"),
    )
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    assert found["NCCL job"]["RAS"] == {
        "available": False, "reason": "Connection refused",
    }  # fmt: skip
    assert list(found) == [
        "versions", "devices", "backends", "NCCL job", "machine", "shared memory",
        "variables", "problems",
    ]  # fmt: skip
    assert found["devices"]["process"] == {"index": 0, "count": 1}
    for problem in (
        "JAXCOMM_TIMEOUT is 'never'",
        "variables: JAXCOMM_BACKEND: 'mpi' is no backend; choose one of "
        "('host', 'nccl', 'xla'), or unset it",
        f"backends: nccl: unavailable: NCCL cannot be loaded: {tmp_path}/libnccl.so: "
        f"cannot open",
        f"variables: JAXCOMM_DUMP_DIR: '{tmp_path}/file/dumps' cannot be written: "
        f"{tmp_path}/file: Not a directory.",
    ):
        assert any(problem in each for each in found["problems"])


@pytest.mark.thorough
@pytest.mark.parametrize("platforms", ["", "rocm"])
def test_platforms_that_are_not_there_are_named_without_noise(command, platforms):
    done = command(JAX_PLATFORMS=platforms)
    assert "Unable to initialize backend" not in done.stderr
    assert "Traceback" not in done.stderr
    if platforms:
        assert done.returncode == 1
        assert "problem: devices: default: JAX finds none: " in done.stdout


def test_records_are_merged(here, record):
    status, out, err = here("--merge", record)
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == (
        "  group 0: rank 1 (process 1, cpu:2048) left no record; rank 0 (process 0, "
        "cpu:0) gave up in psum(float32[4]) #1"
    )
    assert [line for line in out.splitlines() if line != line.rstrip()] == []
    _, out, _ = here("--merge", record, "--json")
    assert json.loads(out)["missing"] == [1]


def test_merged_records_are_written_for_viewers(here, record, tmp_path):
    trace, picture = tmp_path / "trace.json", tmp_path / "x.svg"
    folder = tmp_path / "fr"
    files = "--trace", trace, "--plot", picture, "--fr-trace", folder
    mpl.use("agg")
    status, _, err = here("--merge", record, *files)
    plt.close("all")
    assert (status, err) == (0, "")
    (event,) = [
        event
        for event in json.loads(trace.read_text())["traceEvents"]
        if event["ph"] == "X"
    ]
    assert event["name"] == "psum (failed)"
    assert picture.read_text().startswith("<?xml")
    assert [file.name for file in folder.iterdir()] == ["jaxcomm_rank_0"]
    status, _, err = here("--merge", record, "--trace", tmp_path / "no" / "trace.json")
    assert status == 2
    assert "No such file or directory" in err


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "told"), [("host", ""), ("xla", ": XLA's own collectives are compared")]
)
def test_collectives_are_checked_and_timed(command, backend, told):
    done = command("--check", "--devices", "3", JAXCOMM_BACKEND=backend)
    assert (done.returncode, done.stderr) == (0, "")
    first, _, head, _, *lines, _, last = done.stdout.splitlines()
    assert first.startswith(f"3 x cpu, served by the backend {backend!r}{told}")
    assert head.split("  ")[0] == "collective"
    assert len(lines) == 2 * 17
    assert all(line.split()[3] == "right" for line in lines)
    assert last == "34 of 34 right"


def test_help_is_help(capsys):
    with pytest.raises(SystemExit) as raised:
        options.read(["--help"])
    assert raised.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m jaxcomm.doctor [--json]\n")
    for words in ("--merge", "--check", "is 1 if there is a problem"):
        assert words in out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--merge", "--merge: no file was given"),
        ("record.json", "'record.json' goes with --merge"),
        ("--bogus", "unrecognized arguments: --bogus"),
        ("--check --devices 1", "'1' is not a number from 2 to 256"),
        ("--check --merge x.json", "--check and --merge exclude each other"),
        ("--check --calibrate x.json", "--check and --calibrate exclude"),
        ("--devices 4", "--devices goes with --check"),
        ("--trace x.json", "--trace goes with --merge"),
        ("--fr-trace x", "--fr-trace goes with --merge"),
    ],
)
def test_a_bad_command_line_is_refused(words, text):
    with pytest.raises(options.UsageError, match=f"^.*{text}") as raised:
        options.read(words.split())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("file", "text"),
    [("no/such.json", "No such file or directory"), (__file__, "not JSON")],
)
def test_what_cannot_be_read_is_status_two(here, file, text):
    status, out, err = here("--merge", file)
    assert (status, out) == (2, "")
    assert f"{file}: {text}" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--bogus"], "unrecognized arguments: --bogus. See --help."),
        (["--check"], "JAX finds one device (cpu), and collectives need two"),
    ],
)
def test_what_cannot_be_done_ends_with_status_two(words, text, command):
    done = command(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr
    assert done.stderr.count("\n") == 1
