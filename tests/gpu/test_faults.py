"""Faults in real programs on two GPUs: no number that is not right, and no hang.

On one GPU two processes share it, where NCCL lets them: see ``bench gpu --one-gpu``.
Cases of one process need two. A covering set runs; `make gpu-test ARGS=--thorough` runs
all.

A failure ends CUDA's context, and with it the process: each case has its own.
"""

import pytest
from fault_suite import cases, check, runner
from gpu_count import count_gpus

from bench.gpu import processes
from bench.options import UsageError

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]

# Processes that import JAX while a case runs. They touch no GPU before it is theirs.
AHEAD = 4


@pytest.fixture(scope="session")
def hardware():
    count = count_gpus()
    if count > 1:
        return runner.on_gpus()
    if not count:
        pytest.skip("needs an NVIDIA GPU")
    try:
        return runner.on_gpus(1, processes.for_one_gpu(2))
    except UsageError as error:
        pytest.skip(str(error))


def _skip_unless(hardware, some):
    if not all(map(hardware.takes, some)):
        pytest.skip("needs two NVIDIA GPUs")


@pytest.fixture(scope="session")
def starts(hardware, tmp_path_factory, compiled_once):
    folder = tmp_path_factory.mktemp("faults")
    starter = runner.starter(hardware, folder, compiled_once, ahead=AHEAD)
    yield starter
    starter.stop()


class Line:
    """The cases that are to run: one is getting ready while the one before it ends."""

    def __init__(self, waiting, begin):
        self._waiting = list(waiting)
        self._begin = begin
        self._begun = {}

    def finish(self, case):
        self._waiting.remove(case)
        begun = self._begun.pop(case, None) or self._begin(case)
        return begun.finish(then=self._begin_next)

    def _begin_next(self):
        if self._waiting:
            following = self._waiting[0]
            self._begun[following] = self._begin(following)

    def stop(self):
        for begun in self._begun.values():
            begun.stop()


@pytest.fixture(scope="session")
def line(request, hardware, starts, tmp_path_factory):
    waiting = [
        item.callspec.params["case"]
        for item in request.session.items
        if getattr(item, "originalname", "") == ONE_CASE.__name__
    ]
    waiting = list(filter(hardware.takes, waiting))

    def begin(case):
        folder = tmp_path_factory.mktemp("case")
        return runner.Begun([case], hardware, folder, starts)

    line = Line(waiting, begin)
    yield line
    line.stop()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=[] if case in cases.COVERING else [pytest.mark.thorough]
        )
        for case in cases.ON_GPUS
    ],
    ids=str,
)
def test_no_number_of_a_failed_collective_reaches_the_program(
    case, hardware, line, record_property
):
    _skip_unless(hardware, [case])
    reports = line.finish(case)
    assert check.problems_of(reports, hardware, record_property) == {}


ONE_CASE = test_no_number_of_a_failed_collective_reaches_the_program


@pytest.mark.parametrize(
    "some",
    [
        [each for each in cases.FEW_IN_TURN if each in cases.IN_TURN_IN_ONE_PROCESS],
        pytest.param(cases.IN_TURN_IN_ONE_PROCESS, marks=pytest.mark.thorough),
    ],
    ids=["few", "all"],
)
def test_a_process_with_all_ranks_goes_on_after_each_poisoned_result(
    some, hardware, starts, tmp_path, record_property
):
    _skip_unless(hardware, some)
    assert check.problems(some, hardware, starts, tmp_path, record_property) == {}
