"""Every fault in real programs: no number that is not right, and no hang."""

import pytest
from fault_suite import cases, check, runner

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="session")
def hardware(stand_in_path):
    return runner.over_stand_in(stand_in_path)


@pytest.fixture(scope="session")
def starts(hardware, tmp_path_factory, compiled_once):
    folder = tmp_path_factory.mktemp("faults")
    starter = runner.starter(hardware, folder, compiled_once)
    yield starter
    starter.stop()


@pytest.mark.parametrize("case", cases.OVER_STAND_IN, ids=str)
def test_no_number_of_a_failed_collective_reaches_the_program(
    case, hardware, starts, tmp_path, record_property
):
    assert check.problems([case], hardware, starts, tmp_path, record_property) == {}


def test_a_process_with_all_ranks_goes_on_after_each_poisoned_result(
    hardware, starts, tmp_path, record_property
):
    some = cases.IN_TURN_IN_ONE_PROCESS
    assert check.problems(some, hardware, starts, tmp_path, record_property) == {}
