"""The suite ``processes``: its ratios, of pretended ranks, and its real processes."""

import os
import signal
import sys

import jax
import pytest

from bench import processes_variants
from bench.processes_team import Team, TeamError


def test_a_wrong_result_is_not_timed(monkeypatch):
    right = jax.lax.psum
    monkeypatch.setattr(jax.lax, "psum", lambda x, axes: right(x, axes) + 1)
    with pytest.raises(ValueError, match="results of gloo and jaxcomm differ"):
        processes_variants.build("psum", 64, 64, 1, 0, "mpi4jax is not installed")


PREPARE = {"do": "prepare", "name": "psum", "payload_bytes": 64, "copy_bytes": 64}


@pytest.mark.thorough
@pytest.mark.multiprocess
def test_a_process_that_dies_is_an_error_and_the_next_case_starts_anew(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4jax", None)
    team = Team(2)
    try:
        (found, _) = team.ask(**PREPARE)
        assert found["absent"] == {"mpi4jax": "mpi4jax is not installed"}
        for variant in found["variants"]:
            answers = team.ask(do="sample", variant=variant, calls=1)
            assert all(answer["seconds"] > 0 for answer in answers)
        os.kill(team._running[1].pid, signal.SIGKILL)
        with pytest.raises(TeamError, match=r"process [01] of 2"):
            team.ask(do="sample", variant="gloo", calls=1)
        # The next ones tell an error in their words.
        with pytest.raises(TeamError, match="of 2: KeyError: 'nope'"):
            team.ask(**PREPARE | {"name": "nope"})
    finally:
        team.stop()
