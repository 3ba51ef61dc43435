"""Faults in real programs on two GPUs: no number that is not right, and no hang.

With four GPUs or more, cases run on several pairs at the same time. On one GPU two
processes share it, where NCCL lets them: see ``bench gpu --one-gpu``. Cases of one
process need two. A covering set runs; `make gpu-test ARGS=--thorough` runs all.

A failure ends CUDA's context, and with it the process: each case has its own.
"""

import contextlib
import queue
from concurrent.futures import ThreadPoolExecutor

import pytest
from fault_suite import cases, check, runner
from gpu_count import count_gpus

from bench.gpu import processes
from bench.options import UsageError

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]

# Processes that import JAX while a case runs. They touch no GPU before it is theirs.
AHEAD = 4


@pytest.fixture(scope="module")
def pairs():
    """Two GPUs each, or one that serves two processes."""
    count = count_gpus()
    if count > 1:
        return [runner.on_gpus((at, at + 1)) for at in range(0, count - 1, 2)]
    if not count:
        pytest.skip("needs an NVIDIA GPU")
    try:
        return [runner.on_gpus((0,), processes.for_one_gpu(2))]
    except UsageError as error:
        pytest.skip(str(error))


class Line:
    """Groups of cases that are to run, on some pairs of GPUs at the same time.

    On each pair a group gets ready while the one before it ends.
    """

    def __init__(self, groups, pairs, begin):
        self._free = queue.SimpleQueue()
        for pair in pairs:
            self._free.put(pair)
        self._begin = begin
        self._threads = ThreadPoolExecutor(2 * len(pairs))
        self._ended = {
            str(some): self._threads.submit(self._run, some) for some in groups
        }

    def reports(self, some):
        return self._ended[str(some)].result()

    def stop(self):
        """Start no other group; those that run go to their end."""
        self._threads.shutdown(cancel_futures=True)

    def _run(self, some):
        pair = self._free.get()
        with contextlib.ExitStack() as taken:
            taken.callback(self._free.put, pair)
            return self._begin(some, pair).finish(then=taken.close)


@pytest.fixture(scope="module")
def line(request, pairs, tmp_path_factory, compiled_once):
    folder = tmp_path_factory.mktemp("faults")
    starter = runner.starter(pairs[0], folder, compiled_once, ahead=AHEAD * len(pairs))

    def begin(some, pair):
        return runner.Begun(some, pair, tmp_path_factory.mktemp("case"), starter)

    asked = [item.callspec.params.get("some") for item in request.session.items
             if item.path == request.path]  # fmt: skip
    line = Line(
        [some for some in asked if all(map(pairs[0].takes, some))], pairs, begin
    )
    yield line
    line.stop()
    starter.stop()


def _problems(some, pairs, line, record_property):
    if not all(map(pairs[0].takes, some)):
        pytest.skip("needs two NVIDIA GPUs")
    return check.problems_of(line.reports(some), pairs[0], record_property)


# First, since it takes longest: no pair of GPUs waits for it at the end.
@pytest.mark.parametrize(
    "some",
    [
        [each for each in cases.FEW_IN_TURN if each in cases.IN_TURN_IN_ONE_PROCESS],
        pytest.param(cases.IN_TURN_IN_ONE_PROCESS, marks=pytest.mark.thorough),
    ],
    ids=["few", "all"],
)
def test_a_process_with_all_ranks_goes_on_after_each_poisoned_result(
    some, pairs, line, record_property
):
    assert _problems(some, pairs, line, record_property) == {}


@pytest.mark.parametrize(
    "some",
    [
        pytest.param(
            [case], marks=[] if case in cases.COVERING else [pytest.mark.thorough]
        )
        for case in cases.ON_GPUS
    ],
    ids=lambda some: str(some[0]),
)
def test_no_number_of_a_failed_collective_reaches_the_program(
    some, pairs, line, record_property
):
    assert _problems(some, pairs, line, record_property) == {}
