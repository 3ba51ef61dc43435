"""The command as a user runs it."""

import json

import pytest


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
    assert report["interrupted"] is False
    assert all(roofline["rate"] > 0 for roofline in report["rooflines"])
    assert {row["suite"] for row in report["rows"]} == set(suites.split())
    for row in report["rows"]:
        assert row["devices"] == 2
        for spread in row.get("seconds", {}).values():
            assert 0 < spread["min"] <= spread["median"] <= spread["max"]


def test_a_bad_command_line_ends_with_status_two(command):
    done = command("chain", "--plot", "x.nope")
    assert (done.returncode, done.stdout) == (2, "")
    assert "is no picture format; try .png" in done.stderr
    assert done.stderr.count("\n") == 1
