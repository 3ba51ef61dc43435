"""The command as a user runs it."""

import json

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
        ("collectives", "--sizes 64 --ops psum"),
        pytest.param(
            "collectives chain scan memory attention masks",
            "--sizes 64 --ops psum,all_gather --sequence 128",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_quick_run_prints_a_table_and_writes_json_and_a_picture(
    suites, options, command, tmp_path
):
    report, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    files = f"--quick --devices 2 --repeats 2 --json {report} --plot {picture}"
    done = command(*f"{suites} {options} {files}".split())
    assert done.returncode == 0, done.stderr
    # No progress bar in a pipe.
    assert done.stderr == ""
    assert "jaxcomm" in done.stdout
    assert "…" not in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    report = json.loads(report.read_text())
    assert set(report) == {
        "schema", "command", "started", "seconds", "interrupted", "commit", "machine",
        "load_average_at_end", "versions", "environment", "effort", "rooflines", "rows",
    }  # fmt: skip
    assert report["schema"] == 1
    assert report["command"][:4] == ["python", "-m", "bench", suites.split()[0]]
    assert report["interrupted"] is False
    assert report["machine"]["cpu"]
    assert set(report["versions"]) == {"python", "jaxcomm", "jax", "jaxlib", "numpy"}
    assert {roofline["unit"] for roofline in report["rooflines"]} == {"bytes", "FLOP"}
    assert all(roofline["rate"] > 0 for roofline in report["rooflines"])
    assert {row["suite"] for row in report["rows"]} == set(suites.split())
    for row in report["rows"]:
        assert row["devices"] == 2
        assert set(row) == {"timed": TIMED, "memory": MEMORY}[row["kind"]]
        if row["target"] is not None:
            assert set(row["target"]) == {"measure", "bound", "met"}
        for spread in row.get("seconds", {}).values():
            assert 0 < spread["min"] <= spread["median"] <= spread["max"]


def test_a_bad_command_line_ends_with_status_two(command):
    done = command("chain", "--plot", "x.nope")
    assert (done.returncode, done.stdout) == (2, "")
    assert "is no picture format; try .png" in done.stderr
    assert done.stderr.count("\n") == 1
