import dataclasses
import io
import json

import pytest
from rich.console import Console

from bench import options, plan, processes, table, targets
from bench.options import UsageError

MIB = 1 << 20
NOT_HOST = "its backend here is 'xla', not 'host'"


def read(*words):
    return options.read(words)


def cases(*words):
    return list(plan.cases(read("processes", *words)))


# The command line and the plan.


def test_the_number_of_processes_is_an_option_with_a_short_name():
    assert read("processes").devices_of("processes") == (2,)
    assert read("processes", "-n", "2,8").devices_of("processes") == (2, 8)
    assert read("processes", "--processes=3").devices_of("processes") == (3,)
    assert read("all", "-n", "4").devices_of("chain") == (2, 8)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("-n", "1"), "--processes: '1' is not a number of processes; give 2 to 64"),
        (("-n", "two"), "--processes: 'two' is not a number of processes"),
        (("--devices", "2"), "--devices goes with collectives or chain or scan or"),
        (
            ("--sequence", "64"),
            "--sequence goes with attention or masks, not with processes",
        ),
    ],
)
def test_what_does_not_go_with_processes_is_refused(words, text):
    with pytest.raises(UsageError) as raised:
        read("processes", *words)
    assert text in str(raised.value)


def test_processes_go_with_no_other_suite():
    with pytest.raises(UsageError, match="--processes goes with processes, not with"):
        read("chain", "-n", "2")


def test_every_operation_has_every_size_and_the_chain_comes_last():
    planned = cases()
    assert len(planned) == 4 * 4 + 1
    assert planned[-1].name == "50 dependent psums"
    assert [case.is_last for case in planned] == [False] * 16 + [True]
    assert {case.payload_bytes for case in planned} == {256, 1 << 16, MIB, 16 * MIB}
    assert len({id(case.team) for case in planned}) == 1


def test_many_processes_get_no_large_operands():
    assert max(case.payload_bytes for case in cases("-n", "8")) == MIB


def test_operands_are_rounded_up_to_whole_slices():
    assert cases("-n", "3", "--sizes", "100", "--ops", "psum")[0].payload_bytes == 108


def test_the_work_is_what_must_be_read_and_written():
    gather, _ = cases("-n", "8", "--sizes", "256", "--ops", "all_gather")
    assert gather.work == 8 * 256 * (1 + 8)


def test_the_bounds_are_those_of_the_issue():
    found = {
        (case.name, case.payload_bytes, case.devices, rival, str(bound))
        for case in cases("-n", "2,8")
        for rival in ("gloo", "mpi4jax")
        if (
            bound := targets.for_processes(
                case.name, case.payload_bytes, case.devices, rival
            )
        )
    }
    assert found == {
        ("psum", 16 * MIB, 2, "gloo", ">= 8"),
        ("psum", 16 * MIB, 2, "mpi4jax", ">= 6"),
        ("ppermute", 16 * MIB, 2, "gloo", ">= 6"),
        ("ppermute", 16 * MIB, 2, "mpi4jax", ">= 1.5"),
        ("all_gather", 16 * MIB, 2, "gloo", ">= 6"),
        ("all_gather", 16 * MIB, 2, "mpi4jax", ">= 4"),
        ("all_to_all", 16 * MIB, 2, "gloo", ">= 8"),
        ("50 dependent psums", 256, 2, "gloo", ">= 40"),
        ("50 dependent psums", 256, 2, "mpi4jax", ">= 1"),
        ("psum", MIB, 8, "mpi4jax", ">= 1"),
    }


# A case, with processes that are only pretended.


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


def test_the_slowest_process_counts(session):
    (row,) = case_of(FakeTeam(TIMES)).measure(session)
    assert {name: of.median for name, of in row.seconds.items()} == pytest.approx(
        {"jaxcomm": 2e-3, "gloo": 20e-3, "mpi4jax": 9e-3}
    )
    assert row.ratios == pytest.approx({"gloo": 10.0, "mpi4jax": 4.5})
    assert row.is_met_by("gloo") is True
    assert row.is_met_by("mpi4jax") is False
    assert row.is_met_by("jaxcomm") is None
    assert row.rounds == 2


def test_the_copies_of_all_processes_are_the_limit(session):
    team = FakeTeam(TIMES)
    (row,) = case_of(team).measure(session)
    copied = 2 * 2 * team.asked[0]["copy_bytes"]
    assert row.roofline_rate == pytest.approx(copied / 5e-3)
    rate = 4 * 16 * MIB / 2e-3
    assert row.shares["jaxcomm"] == pytest.approx(rate / row.roofline_rate)


def test_variants_take_turns_and_fast_ones_fill_their_sample():
    effort = dataclasses.replace(
        plan.effort(read("processes", "--quick")), rounds=2, sample_seconds=10e-3
    )
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
    missing = {"jaxcomm": NOT_HOST, "mpi4jax": "mpi4jax is not installed"}
    (row,) = case_of(FakeTeam(times, missing)).measure(session)
    assert set(row.seconds) == {"gloo"}
    assert row.ratios == {}
    assert row.absent == missing
    assert row.is_met_by("gloo") is None
    document = json.loads(json.dumps(row.to_json()))
    assert document["absent"] == missing
    gloo = {"measure": "ratio", "bound": 8.0, "met": None}
    assert document["targets"] == {"gloo": gloo, "mpi4jax": gloo | {"bound": 6.0}}


def test_ranks_that_prepared_different_things_are_not_timed(session):
    team = FakeTeam(TIMES, other={"absent": {"jaxcomm": NOT_HOST}})
    with pytest.raises(RuntimeError, match="ranks have different variants"):
        case_of(team).measure(session)
    assert [message["do"] for message in team.asked] == ["prepare"]
    assert team.stops == 1


@pytest.mark.parametrize(("is_last", "stops"), [(False, 0), (True, 1)])
def test_the_team_goes_after_its_last_case(is_last, stops, session):
    team = FakeTeam(TIMES)
    case_of(team, is_last=is_last).measure(session)
    assert team.stops == stops


def test_the_team_goes_when_the_user_interrupts(session):
    class Interrupted(FakeTeam):
        def ask(self, **message):
            raise KeyboardInterrupt

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


@pytest.fixture
def row(session):
    (row,) = case_of(FakeTeam(TIMES)).measure(session)
    return dataclasses.replace(
        row, shares={"jaxcomm": 0.5, "gloo": 0.05, "mpi4jax": 0.1}
    )


def test_every_rival_has_a_line_with_its_bound(row):
    lines = printed([row])
    titles = [line.strip() for line in lines]
    assert "processes -n 2" in titles
    assert line_with(lines, "psum") == (
        "psum 16 MiB jaxcomm 2 ms 2 ms - 2 ms 33.6 GB/s 50 %"
    )
    gloo = line_with(lines, "gloo", ">=")
    assert gloo == "gloo 20 ms 20 ms - 20 ms 10.00 >= 8 pass 3.36 GB/s 5.0 %"
    assert " 4.50 >= 6 miss " in line_with(lines, "mpi4jax", ">=")


def test_the_caption_says_who_was_measured_and_what_the_limit_is(row):
    text = " ".join(" ".join(printed([row])).split())
    assert "2 processes of one device each; the slowest counts" in text
    assert FakeTeam.peers in text
    assert "part of memcpy in every process" in text


def test_what_was_not_measured_says_so_once(session):
    times = {name: TIMES[name] for name in ("gloo", "memcpy")}
    team = FakeTeam(times, {"jaxcomm": NOT_HOST, "mpi4jax": "mpi4jax is not installed"})
    lines = printed([case_of(team, name).measure(session)[0] for name in ("psum", "x")])
    assert line_with(lines, "psum", "jaxcomm").endswith("jaxcomm not measured")
    assert sum("absent" in line for line in lines) == 2
    text = "\n".join(lines)
    assert text.count(f"jaxcomm: {NOT_HOST}.") == 1
    assert text.count("mpi4jax: mpi4jax is not installed.") == 1


def test_each_number_of_processes_has_its_table(row):
    lines = printed([row, dataclasses.replace(row, devices=8)])
    titles = [line.strip() for line in lines]
    assert titles.index("processes -n 2") < titles.index("processes -n 8")


def test_eighty_columns_cut_nothing(row):
    lines = printed([row], 80)
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert " >= 8 pass " in " ".join(line_with(lines, "gloo", ">=").split())
