"""The fault suite itself: what is right, wrong or hangs is seen as what it is."""

import dataclasses
import json
import re
import signal
import threading
import time

import numpy as np
import pytest
from fault_suite import outcomes, report, runner, verdict
from fault_suite.cases import DEADLINE_SECONDS, Case
from fault_suite.programs import CPU_SIZES, OPERATIONS, STALE, operands
from fault_suite.report import End, Report, Row

STAND_IN = runner.Hardware(
    False, {}, notice_seconds=5.0, patience_seconds=10.0, raise_seconds=5.0
)
GPUS = runner.Hardware(
    True, {}, notice_seconds=0.2, patience_seconds=7.0, raise_seconds=7.0
)
EXPECTED = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
NAN = np.full_like(EXPECTED, np.nan)


def with_first(values, first):
    changed = values.copy()
    changed.flat[0] = first
    return changed


@pytest.mark.parametrize(
    ("found", "expected", "outcome"),
    [
        (EXPECTED, EXPECTED, "right"),
        (NAN, EXPECTED, "poisoned"),
        (NAN * (1 + 1j), EXPECTED + 1j, "poisoned"),
        (np.full(3, -1), np.arange(3), "poisoned"),
        (np.full(3, 255, np.uint8), np.arange(3, dtype=np.uint8), "poisoned"),
        (with_first(EXPECTED, 2), EXPECTED, "WRONG"),
        (with_first(EXPECTED, np.nan), EXPECTED, "WRONG"),
        (with_first(NAN, 1), EXPECTED, "WRONG"),
        (np.array([np.nan + 1j]), np.array([1 + 1j]), "WRONG"),
        (np.array([-1, -1, 0]), np.arange(3), "WRONG"),
        (np.full_like(EXPECTED, STALE), EXPECTED, "WRONG"),
        (EXPECTED[:1], EXPECTED, "WRONG"),
        (EXPECTED.astype(np.float64), EXPECTED, "WRONG"),
    ],
)
def test_a_result_is_judged_by_all_its_numbers(found, expected, outcome):
    judged, text = outcomes.judge(found, expected)
    assert judged == outcome
    assert bool(text) == (outcome == "WRONG")


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_right_result_is_that_of_another_turn_or_the_pattern(name):
    operation, sizes = OPERATIONS[name], CPU_SIZES
    first, second = (
        operation.expected(operands(operation, sizes, seed)) for seed in (1, 2)
    )
    assert outcomes.judge(first, second)[0] == "WRONG"
    assert not (first == STALE).any()


@pytest.fixture(scope="session")
def hardware(stand_in_path):
    return runner.over_stand_in(stand_in_path)


@pytest.fixture(scope="session")
def starts(hardware, tmp_path_factory, compiled_once):
    """Starts two ahead, as on GPUs."""
    folder = tmp_path_factory.mktemp("suite")
    starter = runner.starter(hardware, folder, compiled_once, ahead=2)
    yield starter
    starter.stop()


@pytest.mark.multiprocess
@pytest.mark.parametrize("processes", [1, 2])
def test_programs_without_a_fault_are_right(hardware, starts, tmp_path, processes):
    """And what they overwrite held the pattern: nothing is right because it was."""
    arounds = (
        "alone", "idle_lane", "small_behind_on_other_lane", "lax_behind",
        "compute_behind", "eight_live", "sibling",
    )  # fmt: skip
    cases = [
        Case("none", operation, around, processes=processes)
        for operation, around in zip(OPERATIONS, arounds, strict=True)
    ]
    cases.append(Case("none", "pair", "compute_beside", processes=processes))
    cases.append(Case("none", "psum_large", "small_behind", processes=processes))
    # Processes that meet anew for each case would also test that they can.
    runs = [cases] if processes == 1 else [[cases[-2]], [cases[5]]]
    for number, some in enumerate(runs):
        folder = tmp_path / str(number)
        for each in runner.run(some, hardware, folder, starts):
            assert verdict.problems(each, hardware) == []
            assert each.is_prefilled
            assert {row.rank for row in each.rows} == {0, 1}
            assert {row.outcome for row in each.rows} == {"right"}


@pytest.mark.multiprocess
def test_one_wrong_number_is_seen(hardware, starts, tmp_path):
    (found,) = runner.run([Case("spoilt")], hardware, tmp_path, starts)
    assert {rank: row.outcome for rank, row in found.of("result").items()} == {
        0: "WRONG",
        1: "right",
    }
    (problem,) = verdict.problems(found, hardware)
    assert "1 of 524288 numbers differ" in problem


@pytest.mark.multiprocess
def test_a_process_that_hangs_is_seen_and_ended(hardware, starts, tmp_path):
    case = Case("stuck", processes=1)
    (found,) = runner.run([case], hardware, tmp_path, starts, hang_seconds=2)
    assert {row.outcome for row in found.rows} == {"hung"}
    assert found.ends[0].status is None
    problems = verdict.problems(found, hardware)
    assert any(re.search(r"'result' hung after \d", each) for each in problems)
    assert any("had to be killed" in problem for problem in problems)


@pytest.mark.multiprocess
def test_a_crash_is_no_end_that_was_asked_for(hardware, starts, tmp_path, monkeypatch):
    case = Case("late", on_failure="exit", processes=1)
    # Long after the crash, however late that comes.
    monkeypatch.setattr(runner, "DEADLINE_SECONDS", 60.0)
    monkeypatch.setattr(verdict, "DEADLINE_SECONDS", 60.0)
    taken = []
    take = starts.take

    def take_and_keep():
        taken.append(take())
        threading.Thread(target=crash).start()
        return taken[0]

    def crash():
        if taken[0].until("waiting", str(case), time.monotonic() + 120):
            taken[0].popen.send_signal(signal.SIGABRT)

    monkeypatch.setattr(starts, "take", take_and_keep)
    (found,) = runner.run([case], hardware, tmp_path, starts)
    assert [row.outcome for row in found.rows] == ["exited"] * 2
    assert found.ends[0].status == -signal.SIGABRT
    told = "\n".join(verdict.problems(found, hardware))
    assert "it must take 60 to" in told
    assert "left no dump" in told
    assert "did not name operation" in told


@pytest.mark.multiprocess
def test_a_process_that_cannot_begin_is_no_result(hardware, tmp_path):
    wrong = dataclasses.replace(
        hardware, variables=hardware.variables | {"JAXCOMM_NCCL_LIBRARY": "/nowhere"}
    )
    starts = runner.starter(wrong, tmp_path)
    (found,) = runner.run([Case("none", processes=1)], wrong, tmp_path, starts)
    starts.stop()
    (problem,) = verdict.problems(found, wrong)
    assert "/nowhere" in problem


# What a survivor of each policy must say and do, by which the rest is told wrong.
SAYS = (
    "psum(float32[1,3]) over axes ('i',), rank 0 of 2: not done after "
    f"{DEADLINE_SECONDS:g} s; process 1 has ended"
)
FAILED = "JaxRuntimeError: INTERNAL: CUDA_ERROR_MISALIGNED_ADDRESS"


def case_of(policy):
    if policy == "poison":
        return Case("late", on_failure=policy, processes=1)
    return Case("killed", on_failure=policy)


def survivor(case, hardware):
    """A report of what does all as it must, the survivor or both ranks."""
    if case.on_failure == "exit":
        said = f"jaxcomm: {SAYS}; flight record: /dumps/flight-record-0.json\n"
        end = End(70, 0.0, said, ["/dumps/flight-record-0.json"])
        return Report(case, [Row("result", 0, "exited", 0.1)], {0: end})
    poisons = case.on_failure == "poison"
    text = FAILED if hardware.is_gpu and not poisons else SAYS
    outcome = "poisoned" if poisons else "raised"
    seconds = DEADLINE_SECONDS + 0.1 if case.fault == "late" else 0.1
    rows = []
    for rank in range(3 - case.processes):
        rows += [
            Row("result", rank, outcome, seconds, "" if poisons else text),
            Row("next", rank, "raised", seconds, text),
            Row("anew", rank, "right" if poisons else "raised", seconds, "GPUs lost"),
        ]
    if case.tries_init:
        rows.insert(2, Row("init", 0, "raised", seconds, "GPUs lost"))
    return Report(case, rows, {0: End(0, 0.5, f"jaxcomm: {SAYS}\n")})


POLICIES = ("raise", "poison", "exit")
ON = [(policy, hardware) for policy in POLICIES for hardware in (STAND_IN, GPUS)]


@pytest.mark.parametrize(("policy", "on"), ON)
def test_what_does_as_it_must_has_no_problem(policy, on):
    assert verdict.problems(survivor(case_of(policy), on), on) == []


@pytest.mark.parametrize(("policy", "on"), ON)
@pytest.mark.parametrize("outcome", ["WRONG", "hung", "right"])
def test_no_policy_lets_the_result_of_a_failure_pass(policy, on, outcome):
    found = survivor(case_of(policy), on)
    found.rows[0].outcome = outcome
    assert any(outcome in problem for problem in verdict.problems(found, on))


def test_poison_across_processes_must_be_refused():
    case = Case("none", on_failure="poison")
    for trouble, count in (
        ("CommPolicy(on_failure='poison') needs all devices in this process", 0),
        ("", 1),
        ("process 0 did not become ready", 1),
    ):
        found = Report(case, trouble=trouble)
        assert len(verdict.problems(found, GPUS)) == count


def test_poison_comes_with_what_is_computed_beside():
    case = Case("late", "pair", "compute_beside", "poison", 1)
    found = survivor(case, GPUS)
    found.rows += [Row("beside", rank, "right", 11.0) for rank in (0, 1)]
    found.rows[0].seconds = 11.0
    assert verdict.problems(found, GPUS) == []
    # The deadline, the patience and what keeps the device busy.
    found.rows[0].seconds = 17.1
    (problem,) = verdict.problems(found, GPUS)
    assert "it must take 5 to 17 s" in problem


@pytest.mark.parametrize("fault", ["late", "async_error"])
def test_the_late_rank_has_the_time_that_the_other_had_and_its_own(fault):
    found = survivor(Case("late", on_failure="poison", processes=1), GPUS)
    found.case = Case(fault, on_failure="poison", processes=1)
    for row in found.rows:
        row.text = f"nccl: {row.text}"
    late = found.of("result")[1]
    late.seconds = 19.4
    assert verdict.problems(found, GPUS) == []
    late.seconds = 19.6
    (problem,) = verdict.problems(found, GPUS)
    assert "it must take 0 to 19.5 s" in problem


def test_a_crash_after_the_result_is_told():
    found = survivor(case_of("raise"), GPUS)
    found.rows[3] = Row("afterwards", 0, "exited", 0.2)
    found.ends[0].status = -11
    problems = verdict.problems(found, GPUS)
    assert any("ended with status -11 after its result" in each for each in problems)


def change(**fields):
    def apply(found):
        for name, value in fields.items():
            setattr(found, name, value)

    return apply


def change_row(number, **fields):
    def apply(found):
        for name, value in fields.items():
            setattr(found.rows[number], name, value)

    return apply


def change_end(**fields):
    def apply(found):
        for name, value in fields.items():
            setattr(found.ends[0], name, value)

    return apply


@pytest.mark.parametrize(
    ("policy", "on", "damage", "problem"),
    [
        ("raise", GPUS, change_row(0, seconds=7.3), "it must take 0 to 7 s"),
        ("raise", STAND_IN, change_row(0, seconds=5.1), "it must take 0 to 5 s"),
        ("raise", GPUS, change_end(said=""), "did not name operation, axes, rank"),
        ("raise", GPUS, change_end(said=SAYS), "did not name operation, axes, rank"),
        ("raise", GPUS, change_row(2, outcome="right"), "must be raised"),
        ("raise", GPUS, change_row(2, text="timeout"), "does not say '\\\\bGPU'"),
        ("raise", STAND_IN, change_row(1, outcome="right"), "must be raised"),
        ("raise", STAND_IN, change_row(1, text="rank 0"), "it does not say"),
        ("raise", STAND_IN, change(rows=[]), "said nothing of its result"),
        ("raise", STAND_IN, lambda found: found.rows.pop(), "nothing of 'anew'"),
        ("raise", STAND_IN, change_row(0, outcome="poisoned"), "must be exited or"),
        ("raise", STAND_IN, change(left=["jaxcomm-1-0"]), "/dev/shm/jaxcomm-1-0"),
        ("raise", STAND_IN, change(trouble="it did not begin"), "it did not begin"),
        ("raise", STAND_IN, change_end(status=None), "had to be killed"),
        ("poison", GPUS, change_row(0, outcome="raised"), "must be poisoned"),
        ("poison", GPUS, change_row(1, text="CUDA error"), "it does not say"),
        ("poison", GPUS, change_row(2, outcome="raised"), "must be right"),
        ("poison", GPUS, change_row(0, seconds=1.0), "it must take 5 to 12 s"),
        ("exit", GPUS, change_end(status=0), "ended with status 0"),
        ("exit", GPUS, change_end(status=-6), "ended with status -6"),
        ("exit", GPUS, change_end(said=f"jaxcomm: {SAYS}"), "named no dump"),
        ("exit", GPUS, change_end(dumps=[]), "left no dump"),
        ("exit", GPUS, change_row(0, outcome="raised"), "must be exited"),
        ("exit", GPUS, change_row(0, seconds=9.0), "it must take 0 to 1.2 s"),
    ],
)
def test_each_thing_that_must_not_be_is_told(policy, on, damage, problem):
    found = survivor(case_of(policy), on)
    damage(found)
    problems = verdict.problems(found, on)
    assert any(problem in each for each in problems), problems


def test_in_one_process_what_is_made_anew_says_that_the_gpus_are_lost():
    found = survivor(Case("late", processes=1), GPUS)
    assert verdict.problems(found, GPUS) == []
    found.rows[2].text = FAILED
    (problem,) = verdict.problems(found, GPUS)
    assert "does not say '\\\\bGPU'" in problem


def test_a_last_resort_must_say_why_too():
    found = survivor(Case("killed", on_failure="exit"), GPUS)
    found.case = Case("killed")
    assert verdict.problems(found, GPUS) == []
    found.ends[0].status = 0
    assert verdict.problems(found, GPUS) == ["process 0 ended with status 0"]
    found.ends[0] = End(1, 0.0, "Segmentation fault")
    (problem,) = verdict.problems(found, GPUS)
    assert "did not name operation" in problem


def test_reports_are_a_table_a_line_and_json(tmp_path):
    told = [survivor(Case("killed"), STAND_IN).to_json()]
    assert report.table(told).splitlines()[2:] == [
        "| killed-psum_large-alone-raise-2x1 | 0 | raised | 0.100 | next raised, "
        "init raised, anew raised |"
    ]
    assert report.summary(told) == "1 cases; results of ranks: 1 raised"
    report.write(told, str(tmp_path / "faults.json"))
    read = json.loads((tmp_path / "faults.json").read_text())
    assert read[0]["rows"][0]["outcome"] == "raised"
