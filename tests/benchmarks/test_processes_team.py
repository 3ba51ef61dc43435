import json
import os
import signal

import pytest

from bench import processes_team
from bench.processes_team import Team, TeamError

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def team():
    """Two processes, started by the first question."""
    team = Team(2)
    yield team
    team.stop()


def prepare(team):
    (first, _) = team.ask(do="prepare", name="psum", payload_bytes=64, copy_bytes=64)
    return first


@pytest.fixture
def without_mpi(monkeypatch):
    find_spec = processes_team.importlib.util.find_spec
    monkeypatch.setattr(
        processes_team.importlib.util,
        "find_spec",
        lambda name: None if name == "mpi4jax" else find_spec(name),
    )


@pytest.mark.slow
@pytest.mark.thorough
def test_a_quick_run_prints_a_table_and_writes_json(command, tmp_path):
    report = tmp_path / "bench.json"
    done = command(
        "processes", "-n", "2", "--quick", "--repeats", "2", "--sizes", "64",
        "--ops", "psum,all_to_all,psum_scatter",
        "--json", str(report), "--plot", str(tmp_path / "bench.png"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "processes -n 2" in done.stdout
    rows = json.loads(report.read_text())["rows"]
    names = ["psum", "all_to_all", "psum_scatter", "50 dependent psums"]
    assert [row["name"] for row in rows] == names
    for row in rows:
        assert row["kind"] == "processes"
        assert {*row["seconds"], *row["absent"]} == {"jaxcomm", "gloo", "mpi4jax"}
        assert {"jaxcomm", "gloo"} <= set(row["seconds"])
        for of in row["seconds"].values():
            assert 0 < of["min"] <= of["lower"] <= of["median"] <= of["upper"]
            assert of["upper"] <= of["max"]
    assert rows[2]["absent"]["mpi4jax"]
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_a_process_that_dies_is_an_error_and_the_next_case_starts_anew(
    team, without_mpi
):
    found = prepare(team)
    assert found["absent"] == {"mpi4jax": "mpi4jax is not installed"}
    for variant in found["variants"]:
        answers = team.ask(do="sample", variant=variant, calls=1)
        assert all(answer["seconds"] > 0 for answer in answers)
    first = [process.pid for process in team._running]
    os.kill(first[1], signal.SIGKILL)
    with pytest.raises(TeamError, match=r"process [01] of 2"):
        team.ask(do="sample", variant="gloo", calls=1)
    for pid in first:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    # The next ones tell an error in their words.
    with pytest.raises(TeamError, match="of 2: KeyError: 'nope'"):
        team.ask(do="prepare", name="nope", payload_bytes=64, copy_bytes=64)
    assert team._running == []


def test_processes_that_do_not_start_are_tried_once(team, without_mpi, monkeypatch):
    monkeypatch.setattr(processes_team, "_WORKER", "no.such.module")
    for _ in range(2):
        with pytest.raises(TeamError, match="2 processes did not start: one ended"):
            prepare(team)
    monkeypatch.undo()
    with pytest.raises(TeamError, match="No module named 'no'"):
        prepare(team)
