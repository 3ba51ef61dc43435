"""The command as a user runs it."""

import json
import os
import signal
import subprocess
import sys

import pytest

ROW = {"kind", "suite", "name", "devices", "detail", "target"}
TIMED = ROW | {
    "dtype", "payload_bytes", "seconds", "ratios", "unit", "work", "rates", "roofline",
    "roofline_rate", "shares", "calls", "rounds",
}  # fmt: skip
MEMORY = ROW | {"temp_bytes", "growth"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suites", "options"),
    [
        ("collectives", "--devices 2 --sizes 64 --ops psum"),
        *(
            pytest.param(suites, options, marks=pytest.mark.thorough)
            for suites, options in (
                ("collectives", "--devices 2,3 --sizes 64 --ops psum,all_gather"),
                ("chain scan memory", "--devices 2"),
                ("attention masks", "--devices 2 --sequence 128"),
            )
        ),
    ],
)
def test_a_quick_run_prints_a_table_and_writes_json_and_a_picture(
    suites, options, command, tmp_path
):
    report, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    files = f"--quick --repeats 2 --json {report} --plot {picture}"
    done = command(*f"{suites} {options} {files}".split())
    assert done.returncode == 0, done.stderr
    # No progress bar in a pipe.
    assert done.stderr == ""
    assert "jaxcomm" in done.stdout
    assert "…" not in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    check_report(json.loads(report.read_text()), suites.split())


def check_report(report, suites):
    assert set(report) == {
        "schema", "command", "started", "seconds", "interrupted", "commit", "machine",
        "load_average_at_end", "versions", "environment", "effort", "rooflines", "rows",
    }  # fmt: skip
    assert report["schema"] == 1
    assert report["command"][:4] == ["python", "-m", "bench", suites[0]]
    assert report["interrupted"] is False
    assert report["machine"]["cpu"]
    assert report["machine"]["cores"] >= 1
    assert set(report["versions"]) == {"python", "jaxcomm", "jax", "jaxlib", "numpy"}
    assert {roofline["unit"] for roofline in report["rooflines"]} == {"bytes", "FLOP"}
    assert all(roofline["rate"] > 0 for roofline in report["rooflines"])
    assert {row["suite"] for row in report["rows"]} == set(suites)
    for row in report["rows"]:
        assert row["devices"] in (2, 3)
        assert set(row) == {"timed": TIMED, "memory": MEMORY}[row["kind"]]
        if row["target"] is not None:
            assert set(row["target"]) == {"measure", "bound", "met"}
        for spread in row.get("seconds", {}).values():
            assert 0 < spread["min"] <= spread["median"] <= spread["max"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("nope",), "subcommand 'nope' is unknown"),
        (("chain", "--plot", "x.nope"), "is no picture format; try .png"),
    ],
)
def test_a_bad_command_line_ends_with_status_two(arguments, text, command):
    done = command(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


def test_help_is_not_an_error(command):
    done = command("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: python -m bench" in done.stdout


@pytest.mark.thorough
def test_an_interrupt_prints_and_writes_what_was_measured(tmp_path):
    report = tmp_path / "bench.json"
    # Far more rounds than the test waits for: only the interrupt can end it.
    arguments = ("chain", "--quick", "--devices", "2", "--repeats", "1000000")
    with subprocess.Popen(
        [sys.executable, "-m", "bench", *arguments, "--json", str(report)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"XLA_FLAGS": os.environ["QUICK_XLA_FLAGS"]},
    ) as process:
        # The rooflines are printed when they are known; the rows come next.
        while "split over" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        err = ""
        for line in process.stderr:
            err += line
            # Python drops it in a destructor or a callback, and says so.
            if line.startswith("Exception ignored"):
                process.send_signal(signal.SIGINT)
        out = process.stdout.read()
    assert process.returncode == 130, err
    assert "Interrupted; 0 rows were measured." in out
    assert "\nTraceback" not in f"\n{err}"
    assert json.loads(report.read_text())["interrupted"] is True
