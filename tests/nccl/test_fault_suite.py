"""The fault suite itself: what is right, wrong or hangs is seen as what it is."""

import dataclasses

import numpy as np
import pytest
import waiting
from fault_suite import outcomes, runner, verdict
from fault_suite.cases import Case
from fault_suite.programs import STALE
from fault_suite.report import End, Report, Row

GPUS = runner.on_gpus()
RAISED = Row("result", 0, "raised", "CUDA_ERROR_MISALIGNED_ADDRESS")
INIT, ANEW = (Row(what, 0, "raised", "GPUs are lost") for what in ("init", "anew"))
EXIT, ENDED = Case("killed", on_failure="exit"), Row("result", 0, "exited")
EXPECTED = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
NAN = np.full_like(EXPECTED, np.nan)


def with_first(values, first):
    changed = values.copy()
    changed.flat[0] = first
    return changed


def test_a_result_is_judged_by_all_its_numbers():
    for found, expected, outcome in (
        (EXPECTED, EXPECTED, "right"),
        (NAN, EXPECTED, "poisoned"),
        (NAN * (1 + 1j), EXPECTED + 1j, "poisoned"),
        (np.full(3, -1), np.arange(3), "poisoned"),
        (np.full(3, 255, np.uint8), np.arange(3, dtype=np.uint8), "poisoned"),
        (with_first(EXPECTED, np.nan), EXPECTED, "WRONG"),
        (with_first(NAN, 1), EXPECTED, "WRONG"),
        (np.array([np.nan + 1j]), np.array([1 + 1j]), "WRONG"),
        (np.array([-1, -1, 0]), np.arange(3), "WRONG"),
        (np.full_like(EXPECTED, STALE), EXPECTED, "WRONG"),
        (EXPECTED[:1], EXPECTED, "WRONG"),
        (EXPECTED.astype(np.float64), EXPECTED, "WRONG"),
    ):
        judged, text = outcomes.judge(found, expected)
        assert judged == outcome, (found, expected)
        assert bool(text) == (outcome == "WRONG")


def run(cases, hardware, folder, starts, **how):
    return runner.Begun(cases, hardware, folder, starts).finish(**how)


@pytest.mark.multiprocess
def test_programs_without_a_fault_are_right(hardware, starts, tmp_path):
    """And what they overwrite held the pattern: nothing is right because it was."""
    cases = [
        Case("none", "psum_of_integers", "idle_lane", processes=1),
        Case("none", "product", "lax_behind", processes=1),
    ]
    for each in run(cases, hardware, tmp_path, starts):
        assert verdict.problems(each, hardware) == []
        assert each.is_prefilled
        assert {row.rank for row in each.rows} == {0, 1}
        assert {row.outcome for row in each.rows} == {"right"}


@pytest.mark.multiprocess
def test_a_wrong_number_and_a_hang_are_seen(hardware, starts, tmp_path):
    cases = [Case("spoilt", processes=1), Case("stuck", processes=1)]
    found = run(cases, hardware, tmp_path, starts, hang_seconds=waiting.EXPIRES_SECONDS)
    wrong, hung = (verdict.problems(each, hardware) for each in found)
    assert len(wrong) == 1
    assert "1 of 1572864 numbers differ" in wrong[0]
    assert "rank 0: 'result' hung" in hung
    assert "process 0 had to be killed" in hung


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, None),
        ({"trouble": "it did not begin"}, "it did not begin"),
        ({"left": ["jaxcomm-1-0"]}, "/dev/shm/jaxcomm-1-0 was left"),
        ({"rows": []}, "said nothing of its result"),
        ({"ends": {0: End(0, "jaxcomm: psum")}}, "did not name operation, axes, rank"),
        *(
            ({"rows": [Row("result", 0, outcome)]}, f"'result' {outcome}")
            for outcome in ("WRONG", "hung", "right", "poisoned")
        ),
        *(
            ({"rows": [RAISED, Row(what, 0, "right"), ANEW]}, "must be raised")
            for what in ("next", "init")
        ),
        # A crash is no end that was asked for, nor is one that says nothing.
        ({"rows": [ENDED], "ends": {0: End(-9)}}, "ended with status -9"),
        ({"rows": [ENDED], "ends": {0: End(70)}, "case": EXIT}, "left no dump"),
    ],
)
def test_each_thing_that_must_not_be_is_told(fields, problem):
    told = "jaxcomm: psum(float32[3]) over axes ('i',), rank 0: process 1 has ended"
    rows = [RAISED, dataclasses.replace(RAISED, what="next"), INIT, ANEW]
    right = Report(Case("killed"), rows, {0: End(0, told)})
    problems = verdict.problems(dataclasses.replace(right, **fields), GPUS)
    assert any(problem in each for each in problems) if problem else problems == []
