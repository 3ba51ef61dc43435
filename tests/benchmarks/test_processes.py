"""The suite ``processes``, with processes that are only pretended."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from bench import options, plan, processes, table

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


def test_operands_are_whole_slices_and_none_too_large_for_many():
    assert max(case.payload_bytes for case in cases("-n", "8")) == MIB
    assert cases("-n", "3", "--sizes", "100", "--ops", "psum")[0].payload_bytes == 108
    gather, _ = cases("-n", "8", "--sizes", "256", "--ops", "all_gather")
    # What must be read and written.
    assert gather.work == 8 * 256 * (1 + 8)


class FakeTeam:
    """Two ranks whose samples take given times; nothing is started."""

    count = 2
    peers = "gloo of jaxlib 1; mpi4jax 2 with MPICH 3"

    def __init__(self, seconds, absent=None, other=None):
        self.seconds = seconds
        self.absent = absent or {}
        self.other = other or {}
        self.asked = []
        self.stops = 0

    def ask(self, **message):
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


def case_of(team, name="psum", size=16 * MIB, **options):
    return processes.ProcessesCase(
        suite="processes",
        name=name,
        devices=2,
        team=team,
        payload_bytes=size,
        work=4 * size,
        **options,
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


def test_variants_take_turns_and_fast_ones_fill_their_sample():
    effort = plan.effort(options.read(("processes", "--quick")))
    effort = dataclasses.replace(effort, rounds=2, sample_seconds=10e-3)
    limit = dataclasses.make_dataclass("Limit", ["unit", "work", "rate"])
    session = dataclasses.make_dataclass("Session", ["effort", "rooflines"])(
        effort, [limit("bytes", 4096, 1.0)]
    )
    team = FakeTeam(TIMES)
    (row,) = case_of(team).measure(session)
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
    class Interrupted(FakeTeam):
        def ask(self, **message):
            raise KeyboardInterrupt

    for is_last in (False, True):
        team = FakeTeam(TIMES)
        case_of(team, is_last=is_last).measure(session)
        assert team.stops == is_last
    team = Interrupted(TIMES)
    with pytest.raises(KeyboardInterrupt):
        case_of(team).measure(session)
    assert team.stops == 1


# The table.


def printed(rows, width=200):
    console = Console(file=io.StringIO(), width=width)
    for renderable in table.tables(rows, width):
        console.print(renderable)
    return console.file.getvalue().splitlines()


def line_with(lines, *words):
    (line,) = (line for line in lines if all(word in line for word in words))
    return " ".join(line.split())


def test_every_rival_has_a_line_with_its_bound(session):
    (row,) = case_of(FakeTeam(TIMES)).measure(session)
    shares = {"jaxcomm": 0.5, "gloo": 0.05, "mpi4jax": 0.1}
    row = dataclasses.replace(row, shares=shares)
    lines = printed([row])
    assert line_with(lines, "psum") == (
        "psum 16 MiB jaxcomm 2 ms 2 ms - 2 ms 33.6 GB/s 50 %"
    )
    gloo = line_with(lines, "gloo", ">=")
    assert gloo == "gloo 20 ms 20 ms - 20 ms 10.00 >= 8 pass 3.36 GB/s 5.0 %"
    assert " 4.50 >= 6 miss " in line_with(lines, "mpi4jax", ">=")
    text = " ".join(" ".join(lines).split())
    assert "2 processes of one device each; the slowest counts" in text
    assert FakeTeam.peers in text
    assert "part of memcpy in every process" in text
    # Each number of processes has a table, which fits into a terminal.
    lines = printed([row, dataclasses.replace(row, devices=8)], 80)
    titles = [line.strip() for line in lines]
    assert titles.index("processes -n 2") < titles.index("processes -n 8")
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)


def test_what_was_not_measured_says_so_once(session):
    times = {name: TIMES[name] for name in ("gloo", "memcpy")}
    team = FakeTeam(times, WITHOUT)
    lines = printed([case_of(team, name).measure(session)[0] for name in ("psum", "x")])
    assert line_with(lines, "psum", "jaxcomm").endswith("jaxcomm not measured")
    assert sum("absent" in line for line in lines) == 2
    text = "\n".join(lines)
    assert text.count(f"jaxcomm: {NOT_HOST}.") == 1
    assert text.count(f"mpi4jax: {NO_MPI}.") == 1
