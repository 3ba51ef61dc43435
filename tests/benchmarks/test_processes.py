"""The suite ``processes``: its ratios, of pretended ranks, and its real processes."""

import os
import signal
import sys

import jax
import pytest

from bench import processes, processes_variants
from bench.processes_team import Team, TeamError

MIB = 1 << 20


class FakeTeam:
    """Two ranks whose samples take given times; nothing is started."""

    count = 2
    peers = "gloo of jaxlib 1; mpi4jax 2 with MPICH 3"

    def __init__(self, seconds, absent=(), other=()):
        self.seconds, self.absent, self.other = seconds, dict(absent), dict(other)
        self.asked = []

    def ask(self, **message):
        self.asked.append(message)
        if message["do"] == "prepare":
            prepared = {"variants": list(self.seconds), "absent": self.absent}
            return [prepared, prepared | self.other]
        return [{"seconds": each} for each in self.seconds[message["variant"]]]

    def stop(self):
        pass


TIMES = {
    # The second rank is the slowest at ours, the first at the others.
    "jaxcomm": (1e-3, 2e-3),
    "gloo": (20e-3, 10e-3),
    "mpi4jax": (9e-3, 5e-3),
    "memcpy": (5e-3, 5e-3),
}


def measured(team, session):
    of = {"name": "psum", "payload_bytes": 16 * MIB, "work": 4 * 16 * MIB}
    case = processes.ProcessesCase(suite="processes", devices=2, team=team, **of)
    (row,) = case.measure(session)
    return row


def test_the_slowest_process_counts_and_all_copies_are_the_limit(session):
    team = FakeTeam(TIMES)
    row = measured(team, session)
    assert row.ratios == pytest.approx({"gloo": 10.0, "mpi4jax": 4.5})
    # At least 8 and 6 are asked for.
    met = [row.is_met_by(name) for name in ("gloo", "mpi4jax", "jaxcomm")]
    assert met == [True, False, None]
    copied = 2 * 2 * team.asked[0]["copy_bytes"]
    assert row.roofline_rate == pytest.approx(copied / 5e-3)


def test_what_is_absent_has_no_verdict_and_ranks_must_have_the_same(session):
    without = {"jaxcomm": "its backend here is 'xla', not 'host'"}
    times = {name: TIMES[name] for name in ("gloo", "memcpy")}
    row = measured(FakeTeam(times, without), session)
    assert (row.ratios, row.absent, row.is_met_by("gloo")) == ({}, without, None)
    with pytest.raises(RuntimeError, match="ranks have different variants"):
        measured(FakeTeam(TIMES, other={"absent": without}), session)


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
