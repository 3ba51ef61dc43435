import os
import signal
import sys

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


PREPARE = {"do": "prepare", "name": "psum", "payload_bytes": 64, "copy_bytes": 64}


@pytest.fixture
def without_mpi(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4jax", None)


@pytest.mark.thorough
def test_a_process_that_dies_is_an_error_and_the_next_case_starts_anew(
    team, without_mpi
):
    found = team.ask(**PREPARE)[0]
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
        team.ask(**PREPARE | {"name": "nope"})
    assert team._running == []


def test_processes_that_do_not_start_are_tried_once(team, without_mpi, monkeypatch):
    monkeypatch.setattr(processes_team, "_WORKER", "no.such.module")
    for _ in range(2):
        with pytest.raises(TeamError, match="2 processes did not start: one ended"):
            team.ask(**PREPARE)
    monkeypatch.undo()
    with pytest.raises(TeamError, match="No module named 'no'"):
        team.ask(**PREPARE)
