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
IN_TURN = [
    pytest.param(cases.FEW_IN_TURN, False, id="few-in-turn"),
    pytest.param(
        cases.IN_TURN_IN_ONE_PROCESS, False, id="in-turn", marks=pytest.mark.thorough
    ),
]


@pytest.mark.parametrize(
    ("some", "beside"),
    [
        *(pytest.param(some, True, id=f"from-{some[0]}") for some in GROUPS),
        *IN_TURN,
        *(
            pytest.param([case], False, id=str(case), marks=pytest.mark.thorough)
            for case in cases.OVER_STAND_IN
        ),
    ],
)
def test_no_number_of_a_failed_collective_reaches_the_program(
    some, beside, hardware, starts, tmp_path, record_property
):
    found = check.problems(some, hardware, starts, tmp_path, record_property, beside)
    assert found == {}
