"""Every fault in real programs: no number that is not right, and no hang."""

import pytest
from fault_suite import cases, check

pytestmark = pytest.mark.multiprocess

# They run side by side, since they wait most of their time.
BESIDE = 6
GROUPS = [
    cases.COVERING[first : first + BESIDE]
    for first in range(0, len(cases.COVERING), BESIDE)
]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"from-{group[0]}")
def test_no_number_of_a_failed_collective_reaches_the_program(
    group, hardware, starts, tmp_path, record_property
):
    problems = check.problems_beside(group, hardware, starts, tmp_path, record_property)
    assert problems == {}


@pytest.mark.thorough
@pytest.mark.parametrize("case", cases.OVER_STAND_IN, ids=str)
def test_no_number_of_any_failed_collective_reaches_the_program(
    case, hardware, starts, tmp_path, record_property
):
    assert check.problems([case], hardware, starts, tmp_path, record_property) == {}


@pytest.mark.parametrize(
    "some",
    [
        cases.FEW_IN_TURN,
        pytest.param(cases.IN_TURN_IN_ONE_PROCESS, marks=pytest.mark.thorough),
    ],
    ids=["few", "all"],
)
def test_a_process_with_all_ranks_goes_on_after_each_poisoned_result(
    some, hardware, starts, tmp_path, record_property
):
    assert check.problems(some, hardware, starts, tmp_path, record_property) == {}
