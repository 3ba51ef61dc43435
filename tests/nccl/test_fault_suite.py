"""The fault suite itself: what is right, wrong or hangs is seen as what it is."""

import dataclasses
import json
import signal
import threading

import numpy as np
import pytest
import waiting
from fault_suite import outcomes, report, runner, verdict
from fault_suite.cases import Case
from fault_suite.programs import CPU_SIZES, OPERATIONS, STALE, operands
from fault_suite.report import End, Report, Row

STAND_IN, GPUS = runner.over_stand_in("/nowhere"), runner.on_gpus()
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


def run(cases, hardware, folder, starts, **how):
    return runner.Begun(cases, hardware, folder, starts).finish(**how)


@pytest.mark.multiprocess
def test_programs_without_a_fault_are_right(hardware, starts, tmp_path):
    """And what they overwrite held the pattern: nothing is right because it was."""
    one = [
        Case("none", operation, around, processes=1)
        for operation, around in (
            ("psum_of_integers", "idle_lane"), ("all_gather", "compute_behind"),
            ("product", "lax_behind"), ("pair", "compute_beside"),
        )
    ]  # fmt: skip
    for number, some in enumerate([one, [Case("none", "ppermute", "eight_live")]]):
        for each in run(some, hardware, tmp_path / str(number), starts):
            assert verdict.problems(each, hardware) == []
            assert each.is_prefilled
            assert {row.rank for row in each.rows} == {0, 1}
            assert {row.outcome for row in each.rows} == {"right"}


@pytest.mark.multiprocess
def test_one_wrong_number_is_seen(hardware, starts, tmp_path):
    case = Case("spoilt", processes=1)
    (found,) = run([case], hardware, tmp_path, starts)
    outcome = {rank: row.outcome for rank, row in found.of("result").items()}
    assert outcome == {0: "WRONG", 1: "right"}
    (problem,) = verdict.problems(found, hardware)
    assert "1 of 524288 numbers differ" in problem


@pytest.mark.multiprocess
def test_a_process_that_hangs_is_seen_and_ended(hardware, starts, tmp_path):
    case = Case("stuck", processes=1)
    (found,) = run(
        [case], hardware, tmp_path, starts, hang_seconds=waiting.EXPIRES_SECONDS
    )
    assert {row.outcome for row in found.rows} == {"hung"}
    problems = verdict.problems(found, hardware)
    assert "rank 0: 'result' hung" in problems
    assert "process 0 had to be killed" in problems


@pytest.mark.multiprocess
def test_a_crash_is_no_end_that_was_asked_for(hardware, starts, tmp_path, monkeypatch):
    # The other rank never comes, and nobody is told.
    case = Case("stuck", on_failure="exit", processes=1)
    taken = []
    take = starts.take

    def take_and_crash():
        taken.append(take())
        threading.Thread(target=crash).start()
        return taken[0]

    def crash():
        assert taken[0].until("waiting", str(case))
        taken[0].popen.kill()

    monkeypatch.setattr(starts, "take", take_and_crash)
    (found,) = run([case], hardware, tmp_path, starts)
    assert [row.outcome for row in found.rows] == ["exited"] * 2
    # As if that had been the end of a rank that waits.
    found.case = Case("late", on_failure="exit", processes=1)
    told = "\n".join(verdict.problems(found, hardware))
    assert f"ended with status {-signal.SIGKILL}" in told
    assert "left no dump" in told
    assert "did not name operation" in told


@pytest.mark.multiprocess
def test_a_process_that_cannot_begin_is_no_result(hardware, tmp_path):
    wrong = dataclasses.replace(
        hardware, variables=hardware.variables | {"JAXCOMM_NCCL_LIBRARY": "/nowhere"}
    )
    starts = runner.starter(wrong, tmp_path)
    (found,) = run([Case("none", processes=1)], wrong, tmp_path, starts)
    starts.stop()
    (problem,) = verdict.problems(found, wrong)
    assert "/nowhere" in problem


# What a survivor of each policy must say and do, by which the rest is told wrong.
SAYS = (
    "psum(float32[1,3]) over axes ('i',), rank 0 of 2: not done after "
    f"{waiting.EXPIRES_SECONDS:g} s; process 1 has ended"
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
        end = End(70, said, ["/dumps/flight-record-0.json"])
        return Report(case, [Row("result", 0, "exited")], {0: end})
    poisons = case.on_failure == "poison"
    text = FAILED if hardware.is_gpu and not poisons else SAYS
    outcome = "poisoned" if poisons else "raised"
    rows = []
    for rank in range(3 - case.processes):
        rows += [
            Row("result", rank, outcome, "" if poisons else text),
            Row("next", rank, "raised", text),
            Row("anew", rank, "right" if poisons else "raised", "GPUs lost"),
        ]
    if case.tries_init:
        rows.insert(2, Row("init", 0, "raised", "GPUs lost"))
    return Report(case, rows, {0: End(0, f"jaxcomm: {SAYS}\n")})


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


def test_a_crash_after_the_result_is_told():
    found = survivor(case_of("raise"), GPUS)
    found.rows[3] = Row("afterwards", 0, "exited")
    found.ends[0].status = -11
    problems = verdict.problems(found, GPUS)
    assert any("ended with status -11 after its result" in each for each in problems)


def change(**fields):
    return lambda found: [setattr(found, *field) for field in fields.items()]


def change_row(number, **fields):
    return lambda found: change(**fields)(found.rows[number])


def change_end(**fields):
    return lambda found: change(**fields)(found.ends[0])


@pytest.mark.parametrize(
    ("policy", "on", "damage", "problem"),
    [
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
        ("exit", GPUS, change_end(status=0), "ended with status 0"),
        ("exit", GPUS, change_end(status=-6), "ended with status -6"),
        ("exit", GPUS, change_end(said=f"jaxcomm: {SAYS}"), "named no dump"),
        ("exit", GPUS, change_end(dumps=[]), "left no dump"),
        ("exit", GPUS, change_row(0, outcome="raised"), "must be exited"),
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
    found.ends[0] = End(1, "Segmentation fault")
    (problem,) = verdict.problems(found, GPUS)
    assert "did not name operation" in problem


def test_reports_are_a_table_a_line_and_json(tmp_path):
    told = [survivor(Case("killed"), STAND_IN).to_json()]
    assert report.table(told).splitlines()[2:] == [
        "| killed-psum_large-alone-raise-2x1 | 0 | raised | next raised, "
        "init raised, anew raised |"
    ]
    assert report.summary(told) == "1 cases; results of ranks: 1 raised"
    report.write(told, str(tmp_path / "faults.json"))
    read = json.loads((tmp_path / "faults.json").read_text())
    assert read[0]["rows"][0]["outcome"] == "raised"
