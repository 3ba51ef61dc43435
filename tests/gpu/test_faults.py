"""Every fault in real programs on two GPUs: no number that is not right, and no hang.

A failure ends CUDA's context, and with it the process: each case has its own.
"""

import ctypes

import pytest
from fault_suite import cases, check, runner

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]

# Processes that import JAX while a case runs. They touch no GPU before it is theirs.
AHEAD = 2


def _count_gpus():
    """Asks the driver: JAX would take most of the GPUs' memory for this process."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


@pytest.fixture(scope="session")
def hardware():
    if _count_gpus() < 2:
        pytest.skip("needs two NVIDIA GPUs")
    return runner.on_gpus()


@pytest.fixture(scope="session")
def starts(hardware, tmp_path_factory, compiled_once):
    folder = tmp_path_factory.mktemp("faults")
    starter = runner.starter(hardware, folder, compiled_once, ahead=AHEAD)
    yield starter
    starter.stop()


@pytest.mark.parametrize("case", cases.ON_GPUS, ids=str)
def test_no_number_of_a_failed_collective_reaches_the_program(
    case, hardware, starts, tmp_path, record_property
):
    assert check.problems([case], hardware, starts, tmp_path, record_property) == {}


def test_a_process_with_all_ranks_goes_on_after_each_poisoned_result(
    hardware, starts, tmp_path, record_property
):
    some = cases.IN_TURN_IN_ONE_PROCESS
    assert check.problems(some, hardware, starts, tmp_path, record_property) == {}
