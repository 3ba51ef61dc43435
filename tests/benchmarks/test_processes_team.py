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


def test_a_process_that_dies_is_an_error_and_the_next_case_starts_anew(
    team, without_mpi
):
    assert prepare(team)["absent"]["mpi4jax"] == "mpi4jax is not installed"
    first = [process.pid for process in team._running]
    os.kill(first[1], signal.SIGKILL)
    with pytest.raises(TeamError, match=r"process [01] of 2"):
        team.ask(do="sample", variant="gloo", calls=1)
    for pid in first:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert "gloo" in prepare(team)["variants"]
    assert not set(first) & {process.pid for process in team._running}


def test_a_process_that_no_longer_answers_is_ended(team, without_mpi):
    prepare(team)
    pids = [process.pid for process in team._running]
    # Stopped, it neither sees the end of its messages nor obeys SIGTERM.
    os.kill(pids[0], signal.SIGSTOP)
    team.stop(patience=0.0)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_error_in_a_process_is_told_in_its_words(team, without_mpi):
    with pytest.raises(TeamError, match="of 2: KeyError: 'nope'"):
        team.ask(do="prepare", name="nope", payload_bytes=64, copy_bytes=64)
    assert team._running == []


def test_an_mpiexec_that_fails_leaves_the_peer_absent(team, monkeypatch):
    monkeypatch.setattr(processes_team, "_find_mpiexec", lambda: ("false", ""))
    found = prepare(team)
    assert found["absent"]["mpi4jax"] == (
        "did not start under mpiexec: one ended with status 1"
    )
    assert "gloo" in found["variants"]


def test_processes_that_do_not_start_are_tried_once(team, without_mpi, monkeypatch):
    monkeypatch.setattr(processes_team, "_WORKER", "no.such.module")
    for _ in range(2):
        with pytest.raises(TeamError, match="2 processes did not start: one ended"):
            prepare(team)
    monkeypatch.undo()
    with pytest.raises(TeamError, match="No module named 'no'"):
        prepare(team)
