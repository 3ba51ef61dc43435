"""The suite ``processes``, with processes that are only pretended."""

import dataclasses
import json

import jax
import pytest

from bench import options, plan, processes, processes_variants

MIB = 1 << 20
NOT_HOST = "its backend here is 'xla', not 'host'"
NO_MPI = "mpi4jax is not installed"


def cases(*words):
    return list(plan.cases(options.read(("processes", *words))))


def test_every_operation_has_every_size_and_the_chain_comes_last():
    planned = cases()
    assert len(planned) == 4 * 4 + 1
    assert planned[-1].name == "50 dependent psums"
    assert [case.is_last for case in planned] == [False] * 16 + [True]
    assert {case.payload_bytes for case in planned} == {256, 1 << 16, MIB, 16 * MIB}
    assert len({id(case.team) for case in planned}) == 1
    # Operands are whole slices, and none is too large for many.
    assert max(case.payload_bytes for case in cases("-n", "8")) == MIB
    assert cases("-n", "3", "--sizes", "100", "--ops", "psum")[0].payload_bytes == 108
    gather, _ = cases("-n", "8", "--sizes", "256", "--ops", "all_gather")
    # What must be read and written.
    assert gather.work == 8 * 256 * (1 + 8)


class FakeTeam:
    """Two ranks whose samples take given times; nothing is started."""

    count = 2
    peers = "gloo of jaxlib 1; mpi4jax 2 with MPICH 3"

    def __init__(self, seconds, absent=(), other=(), interrupt=False):
        self.seconds, self.absent, self.other = seconds, dict(absent), dict(other)
        self.interrupt, self.asked, self.stops = interrupt, [], 0

    def ask(self, **message):
        if self.interrupt:
            raise KeyboardInterrupt
        self.asked.append(message)
        if message["do"] == "prepare":
            prepared = {"variants": list(self.seconds), "absent": self.absent}
            return [prepared, prepared | self.other]
        return [{"seconds": each} for each in self.seconds[message["variant"]]]

    def stop(self):
        self.stops += 1


TIMES = {
    # The second rank is the slowest at ours, the first at the others.
    "jaxcomm": (1e-3, 2e-3),
    "gloo": (20e-3, 10e-3),
    "mpi4jax": (9e-3, 5e-3),
    "memcpy": (5e-3, 5e-3),
}
WITHOUT = {"jaxcomm": NOT_HOST, "mpi4jax": NO_MPI}


def case_of(team, name="psum", **options):
    of = {"name": name, "payload_bytes": 16 * MIB, "work": 4 * 16 * MIB}
    return processes.ProcessesCase(
        suite="processes", devices=2, team=team, **of, **options
    )


def test_the_slowest_process_counts_and_all_copies_are_the_limit(session):
    team = FakeTeam(TIMES)
    (row,) = case_of(team).measure(session)
    assert {name: of.median for name, of in row.seconds.items()} == pytest.approx(
        {"jaxcomm": 2e-3, "gloo": 20e-3, "mpi4jax": 9e-3}
    )
    assert row.ratios == pytest.approx({"gloo": 10.0, "mpi4jax": 4.5})
    # At least 8 and 6 are asked for.
    met = [row.is_met_by(name) for name in ("gloo", "mpi4jax", "jaxcomm")]
    assert met == [True, False, None]
    assert row.rounds == 2
    copied = 2 * 2 * team.asked[0]["copy_bytes"]
    assert row.roofline_rate == pytest.approx(copied / 5e-3)
    rate = 4 * 16 * MIB / 2e-3
    assert row.shares["jaxcomm"] == pytest.approx(rate / row.roofline_rate)


def test_variants_take_turns_and_fast_ones_fill_their_sample(session):
    effort = plan.effort(options.read(("processes", "--quick")))
    effort = dataclasses.replace(effort, rounds=2, sample_seconds=10e-3)
    team = FakeTeam(TIMES)
    (row,) = case_of(team).measure(dataclasses.replace(session, effort=effort))
    assert row.calls_of == {"jaxcomm": 5, "gloo": 1, "mpi4jax": 2}
    assert row.calls == 5
    samples = [message for message in team.asked if message["do"] == "sample"]
    # Three of one call each say how many calls there should be.
    order = [(each["variant"], each["calls"]) for each in samples[4 * 3 :]]
    once = [("jaxcomm", 5), ("gloo", 1), ("mpi4jax", 2)]
    assert order[:8] == [*once, ("memcpy", 2), *once[::-1], ("memcpy", 2)]


def test_what_is_absent_has_no_ratio_and_no_verdict(session):
    times = {name: TIMES[name] for name in ("gloo", "memcpy")}
    (row,) = case_of(FakeTeam(times, WITHOUT)).measure(session)
    assert set(row.seconds) == {"gloo"}
    assert row.ratios == {}
    assert row.absent == WITHOUT
    assert row.is_met_by("gloo") is None
    document = json.loads(json.dumps(row.to_json()))
    assert document["absent"] == WITHOUT
    gloo = {"measure": "ratio", "bound": 8.0, "met": None}
    assert document["targets"] == {"gloo": gloo, "mpi4jax": gloo | {"bound": 6.0}}


def test_ranks_that_prepared_different_things_are_not_timed(session):
    team = FakeTeam(TIMES, other={"absent": {"jaxcomm": NOT_HOST}})
    with pytest.raises(RuntimeError, match="ranks have different variants"):
        case_of(team).measure(session)
    assert [message["do"] for message in team.asked] == ["prepare"]
    assert team.stops == 1


def test_the_team_goes_after_its_last_case_or_an_interrupt(session):
    for is_last in (False, True):
        team = FakeTeam(TIMES)
        case_of(team, is_last=is_last).measure(session)
        assert team.stops == is_last
    team = FakeTeam(TIMES, interrupt=True)
    with pytest.raises(KeyboardInterrupt):
        case_of(team).measure(session)
    assert team.stops == 1


def test_every_rival_has_a_line_with_its_bound(session, printed, the_line_with):
    (row,) = case_of(FakeTeam(TIMES)).measure(session)
    shares = {"jaxcomm": 0.5, "gloo": 0.05, "mpi4jax": 0.1}
    lines = printed([dataclasses.replace(row, shares=shares)])
    for words, text in (
        (("psum",), "psum 16 MiB jaxcomm 2 ms 2 ms - 2 ms 33.6 GB/s 50 %"),
        (("gloo", ">="), "gloo 20 ms 20 ms - 20 ms 10.00 >= 8 pass 3.36 GB/s 5.0 %"),
        (("mpi4jax", ">="), " 4.50 >= 6 miss "),
    ):
        assert text in the_line_with(lines, *words)
    text = " ".join(" ".join(lines).split())
    assert "2 processes of one device each; the slowest counts" in text
    assert FakeTeam.peers in text
    assert "part of memcpy in every process" in text


# What a process runs, in a group of one.


def build(name="psum"):
    return processes_variants.build(name, 64, 64, 1, 0, NO_MPI)


def test_ours_comes_first_and_the_copy_last(monkeypatch):
    for name in ("psum", "all_to_all", processes_variants.CHAIN):
        calls, absent = build(name)
        assert list(calls) == ["jaxcomm", "gloo", "memcpy"]
        assert absent == {"mpi4jax": NO_MPI}
        for call in calls.values():
            call()
    # Ours is measured over its own transport alone.
    monkeypatch.setattr("jaxcomm.config.BACKEND", "xla")
    calls, absent = build()
    assert list(calls) == ["gloo", "memcpy"]
    assert absent["jaxcomm"] == NOT_HOST


def test_a_wrong_result_is_not_timed(monkeypatch):
    mapped = processes_variants._mapped

    def wrong_for_gloo(name, op, module, *rest):
        right = mapped(name, op, module, *rest)
        return (lambda x: right(x) + 1) if module is jax.lax else right

    monkeypatch.setattr(processes_variants, "_mapped", wrong_for_gloo)
    with pytest.raises(ValueError, match="results of gloo and jaxcomm differ"):
        build()
