"""``python -m jaxcomm.doctor``."""

import json
import os
import socket
import sys

import forked
import pytest

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
            timeout=240,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""} | environment,
        )

    return run


def test_it_prints_what_it_finds(command):
    done = command(JAXCOMM_TIMEOUT="7")
    # Some systems forbid processes to share memory, which is a problem.
    found_none = "no problem was found" in done.stdout
    assert (done.returncode, done.stderr) == (0 if found_none else 1, "")
    for word in ("jaxlib", "1 x cpu", "reduction kernels", "boot id", "pidfd_open"):
        assert word in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "JAXCOMM_TIMEOUT" in line]
    assert line.split() == ["JAXCOMM_TIMEOUT", "7"]
    # A pipe has no width to fill.
    assert [line for line in done.stdout.splitlines() if line != line.rstrip()] == []


def test_what_jax_tried_in_vain_is_not_told(command):
    done = command(JAX_PLATFORMS="")
    assert done.returncode in (0, 1)
    assert "Unable to initialize backend" not in done.stderr


def test_json_is_json(command):
    with socket.create_server(("127.0.0.1", 0)) as other:
        nobody = f"127.0.0.1:{other.getsockname()[1]}"
    done = command("--json", JAXCOMM_TIMEOUT="never", NCCL_RAS_ADDR=nobody)
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
    assert any("JAXCOMM_TIMEOUT is 'never'" in problem for problem in found["problems"])


def test_wrong_variables_are_problems(command, tmp_path):
    (tmp_path / "file").write_text("")
    done = command(
        JAXCOMM_BACKEND="mpi",
        JAXCOMM_NCCL_LIBRARY=str(tmp_path / "libnccl.so"),
        JAXCOMM_DUMP_DIR=str(tmp_path / "file" / "dumps"),
    )
    assert (done.returncode, done.stderr) == (1, "")
    text = " ".join(done.stdout.split())
    for problem in (
        "problem: variables: JAXCOMM_BACKEND: 'mpi' is no backend; choose one of "
        "('host', 'nccl', 'xla'), or unset it",
        f"problem: backends: nccl: unavailable: NCCL cannot be loaded: "
        f"{tmp_path}/libnccl.so: cannot open",
        f"problem: variables: JAXCOMM_DUMP_DIR: '{tmp_path}/file/dumps' cannot be "
        f"written: {tmp_path}/file: Not a directory.",
    ):
        assert problem in text


def test_records_are_merged(command, tmp_path):
    path = tmp_path / "flight-record-0.json"
    path.write_text(json.dumps(RECORD))
    done = command("--merge", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == (
        "  group 0: rank 1 (process 1, cpu:2048) left no record; rank 0 (process 0, "
        "cpu:0) gave up in psum(float32[4]) #1"
    )
    assert [line for line in done.stdout.splitlines() if line != line.rstrip()] == []
    done = command("--merge", path, "--json")
    assert json.loads(done.stdout)["missing"] == [1]


def test_merged_records_are_written_for_viewers(command, tmp_path):
    path = tmp_path / "flight-record-0.json"
    path.write_text(json.dumps(RECORD))
    trace, picture, folder = (
        tmp_path / "trace.json",
        tmp_path / "x.svg",
        tmp_path / "fr",
    )
    files = "--trace", trace, "--plot", picture, "--fr-trace", folder
    done = command("--merge", path, *files, MPLBACKEND="agg")
    assert (done.returncode, done.stderr) == (0, "")
    (event,) = [
        event
        for event in json.loads(trace.read_text())["traceEvents"]
        if event["ph"] == "X"
    ]
    assert event["name"] == "psum (failed)"
    assert picture.read_text().startswith("<?xml")
    assert [file.name for file in folder.iterdir()] == ["jaxcomm_rank_0"]
    done = command("--merge", path, "--trace", tmp_path / "no" / "trace.json")
    assert done.returncode == 2
    assert "No such file or directory" in done.stderr


def test_collectives_are_checked_and_timed(command):
    done = command("--check", "--devices", "3")
    assert (done.returncode, done.stderr) == (0, "")
    first, _, head, _, *lines, _, last = done.stdout.splitlines()
    assert first == "3 x cpu, served by the backend 'host'"
    assert head.split("  ")[0] == "collective"
    assert len(lines) == 2 * 17
    assert all(line.split()[3] == "right" for line in lines)
    assert last == "34 of 34 right"


def test_the_check_of_xla_says_that_it_is_xlas(command):
    done = command("--check", "--devices", "2", "--json", JAXCOMM_BACKEND="xla")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["backend"], found["devices"]) == ("xla", "2 x cpu")
    assert {result["problem"] for result in found["results"]} == {None}


def test_help_is_help(command):
    done = command("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: python -m jaxcomm.doctor [--json]\n")
    assert "--merge" in done.stdout
    assert "--check" in done.stdout
    assert "is 1 if there is a problem" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--merge",), "--merge: no file was given"),
        (("record.json",), "'record.json' goes with --merge"),
        (("--bogus",), "unrecognized arguments: --bogus"),
        (("--check",), "JAX finds one device (cpu), and collectives need two"),
        (("--check", "--devices", "1"), "'1' is not a number from 2 to 256"),
        (("--check", "--merge", "x.json"), "--check and --merge exclude each other"),
        (("--devices", "4"), "--devices goes with --check"),
        (("--trace", "x.json"), "--trace goes with --merge"),
        (("--fr-trace", "x"), "--fr-trace goes with --merge"),
        (("--merge", "no/such.json"), "no/such.json: No such file or directory"),
        (("--merge", __file__), "test_command.py: not JSON"),
    ],
)
def test_a_bad_command_line_or_file_ends_with_status_two(arguments, text, command):
    done = command(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_platform_that_is_not_there_is_a_problem_with_a_name(command):
    done = command(JAX_PLATFORMS="rocm")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "problem: devices: default: JAX finds none: " in done.stdout + done.stderr
