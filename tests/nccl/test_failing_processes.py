"""Several processes over NCCL: what one cannot do, and who is told of a failure."""

import signal

import numpy as np
import pytest
import waiting
from team import starting

from jaxcomm.diagnostics import record
from jaxcomm.diagnostics.findings import MISMATCH
from jaxcomm.diagnostics.merge import merge

pytestmark = pytest.mark.multiprocess


PSUM = """
mesh = mesh_of()
psum = jitted(lambda x: jaxcomm.psum(x, "i"), mesh)
x = spread(mesh, 3)
jaxcomm.init(mesh)
answer = [m.backend for m in jaxcomm.communicators()], values(psum(x))
"""
AGAIN = f"jaxcomm.finalize()\n{PSUM}"
STAND_IN = "from stand_in import StandIn; stand_in = StandIn()"
RIGHT = [[["nccl"], [1.0]]] * 2
STATS = "stats = jaxcomm.communicators()[0].stats()\n"
BY_KERNELS = f'{STATS}answer = [stats["one_shot_calls"], stats["one_shot"]]'


def fail(process, function, result):
    process.ask(f"{STAND_IN}; stand_in.fail({function!r}, {result})")


def are_refused(outcomes, *texts):
    for outcome in outcomes:
        # The second where it waited in vain.
        assert outcome.get("error") in ("CommunicatorError", "LateError"), outcome
        for text in texts:
            assert text in outcome["text"]


@pytest.fixture(scope="module")
def pair(environment, tmp_path_factory):
    with starting(tmp_path_factory.mktemp("pair"), **environment) as begin:
        yield begin(2)


@pytest.fixture
def processes(pair):
    """The pair, after a sum that was right; and afterwards another."""
    assert pair.ask(AGAIN) == RIGHT
    yield pair
    assert pair.ask(AGAIN) == RIGHT


def lines_of(process):
    return [x for x in process.said().splitlines() if x.startswith("jaxcomm: ")]


MINE = "psum(float32[1,3]) over axes ('i',) (lane 'default'"


def test_processes_that_do_different_things_lose_their_gpus(start):
    processes = start(2)
    policy = 'jaxcomm.init(mesh, policy=jaxcomm.CommPolicy(on_failure="raise"))'
    assert processes.ask(PSUM.replace("jaxcomm.init(mesh)", policy)) == RIGHT
    processes[0].tell("begin(lambda: values(psum(x)))")
    processes[1].tell(
        'other = jitted(lambda x: jaxcomm.all_gather(x, "i"), mesh)\n'
        "begin(lambda: values(other(x)))"
    )
    cause = "disagree about ncclAllReduce against ncclAllGather"
    for rank, call in enumerate((MINE, "all_gather(float32[1,3])")):
        process = processes[rank]
        process.hear()
        outcome = process.ask("answer = outcome()")
        # Which of them it is depends on where JAX meets the error.
        assert outcome.get("error") in ("JaxRuntimeError", "ValueError"), outcome
        assert "CUDA error 716" in outcome["text"] or cause in outcome["text"]
        texts = call, f"rank {rank} of 2 (device ", cause

        def is_said(process=process, texts=texts):
            return any(all(x in line for x in texts) for line in lines_of(process))

        # CUDA's error does not say why: the line is there before it.
        if cause in outcome["text"]:
            waiting.until(is_said, process=process.popen)
        assert is_said(), process.said()


def test_small_sums_are_nccl_s_on_all_where_one_process_cannot_do_them(start):
    """Its GPU has not the kernel, or reaches no other's memory; and then it can."""
    processes = start(2, JAXCOMM_FAKE_KERNELS="1")
    processes.ask("mesh = mesh_of()")
    # Copies between processes map memory, too.
    alone = "jaxcomm.init(mesh, policy=jaxcomm.CommPolicy(copy_engines=False))"
    again = AGAIN.replace("jaxcomm.init(mesh)", alone)
    # The kernels that stop a GPU are there before that of sums is asked for.
    assert processes.ask(again) == RIGHT
    assert processes.ask(BY_KERNELS) == [[1, "yes"]] * 2
    for function in ("cuModuleGetFunction", "cuIpcGetMemHandle", "cuIpcOpenMemHandle"):
        for name in (function, f"{function}_v2"):
            fail(processes[1], name, 1)
        assert processes.ask(again) == RIGHT
        first, (calls, why) = processes.ask(BY_KERNELS)
        assert first == [0, "no: rank 1 cannot"]
        assert calls == 0
        assert why.startswith(f"no: {function}: ")
    assert processes.ask(again) == RIGHT
    assert processes.ask(BY_KERNELS) == [[1, "yes"]] * 2


def test_what_one_process_cannot_map_is_nccl_s_on_all(processes):
    shift = """
jaxcomm.finalize()
jaxcomm.init(mesh)
shift = jitted(lambda x: jaxcomm.ring_shift(x, "i"), mesh)
y = spread(mesh, 1 << 20)
answer = values(shift(y)), jaxcomm.communicators()[0].stats()["copied_calls"]
"""
    assert processes.ask(shift) == [[[1.0], 1], [[0.0], 1]]
    for name in ("cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", "cuStreamBatchMemOp_v2"):
        fail(processes[1], name, 1)
        assert processes.ask(shift) == [[[1.0], 0], [[0.0], 0]]


def test_a_process_dies_between_its_flag_and_the_copy(start):
    """What another pulls from it is right, or no number; then all memory goes back."""
    processes = start(2, JAX_ENABLE_RECOVERABILITY="1")
    ring = """
from jaxcomm._built import _ffi
mesh = mesh_of()
jaxcomm.init(mesh, policy=jaxcomm.CommPolicy(on_failure="poison"))
shift = jitted(lambda x: jaxcomm.ring_shift(x, "i"), mesh)
y = spread(mesh, 1 << 20)
answer = values(shift(y)), jaxcomm.communicators()[0].stats()["copied_calls"]
"""
    assert processes.ask(ring) == [[[1.0], 1], [[0.0], 1]]
    processes[1].ask(
        f"{STAND_IN}; stand_in.clear()\nbegin(lambda: values(shift(y)))\n"
        "stand_in.until_called('cuStreamBatchMemOp_v2', 1)"
    )
    processes[1].popen.kill()
    outcome = processes[0].ask("answer = attempt(lambda: values(shift(y)))")
    assert "error" in outcome or outcome["value"][0] in (
        1.0,
        pytest.approx(np.nan, nan_ok=True),
    )
    shrunk = """
attempt(lambda: values(jaxcomm.raise_if_failed(shift(y))))
mesh = jaxcomm.shrink(mesh, "i")
waiting.until(lambda: _ffi.arena_bytes() == 0)
answer = mesh.size, values(y)
"""
    assert processes[0].ask(shrunk) == [1, [0.0]]


def test_a_creation_that_fails_on_one_process_ends_on_all(processes):
    processes.ask("jaxcomm.finalize()")
    fail(processes[1], "ncclCommSplit", 3)
    answers = processes.ask(
        f"soon = {waiting.EXPIRES_SECONDS}\n"
        "answer = attempt(lambda: jaxcomm.init(mesh, timeout=soon) and 0)"
    )
    are_refused(answers, "NCCL did not make a communicator over axes ('i',)")


def test_processes_that_make_different_communicators_are_told(processes, environment):
    """Before NCCL is asked, which would wait for ever."""
    made = "is to make a communicator over axes ('i',), lane"
    for code, texts in (
        (
            'how = {"lanes": ("keys", "values")[index]}',
            ["processes [0, 1] are out of step", f"process 0 {made} 'keys', ",
             f"process 1 {made} 'values', "],
        ),
        (
            'how = {"policy": jaxcomm.CommPolicy(max_ctas=2 + 2 * index)}',
            ["'maxCTAs': 2", "'maxCTAs': 4"],
        ),
        (
            "how = {}\n"
            "if index: del os.environ['JAXCOMM_NCCL_LIBRARY']",
            ["process 1: NCCL serves NVIDIA GPUs, not cpu devices"],
        ),
        (
            "jaxcomm.config.CHECK = str(index)",
            ["checked"],
        ),
    ):  # fmt: skip
        outcomes = processes.ask(
            f"jaxcomm.finalize()\n{code}\n"
            "answer = attempt(lambda: jaxcomm.init(mesh, **how) and 0)"
        )
        are_refused(outcomes, *texts)
        processes.ask(f"os.environ |= {environment}; jaxcomm.config.CHECK = '0'")
        # Nothing was made, and both go on.
        assert processes.ask("answer = jaxcomm.communicators().counters.live") == [0, 0]
        assert processes.ask(AGAIN) == RIGHT


def test_processes_that_call_different_things_all_hear_who_is_odd(start):
    processes = start(2, JAXCOMM_CHECK="1")
    assert processes.ask(PSUM) == RIGHT
    outcomes = processes.ask(
        'gather = jitted(lambda x: jaxcomm.all_gather(x, "i"), mesh)\n'
        "answer = attempt(lambda: values((psum if index else gather)(x)))"
    )
    for outcome in outcomes:
        assert "JAXCOMM_CHECK: ranks disagree: rank 1 calls psum(" in outcome["text"]
        assert "where rank 0 calls all_gather(" in outcome["text"]
    told = processes.ask("answer = jaxcomm.flight_record().to_json()")
    (finding,) = merge(map(record.parse, told)).findings
    assert finding.kind == MISMATCH
    assert "rank 0 (process 0, cpu:0) ran all_gather(" in finding.text


def test_no_process_stops_nccl_before_the_others_have_poisoned_their_results(start):
    """What a kernel that is stopped tells its peers would be taken for data."""
    processes = start(3, JAX_ENABLE_RECOVERABILITY="1")
    poison = f"""
mesh = mesh_of()
psum = jitted(lambda x: jaxcomm.psum(x, "i"), mesh)
x = spread(mesh, 3)
soon = {waiting.EXPIRES_SECONDS} if index == 0 else {waiting.HANG_SECONDS}
policy = jaxcomm.CommPolicy(on_failure="poison")
jaxcomm.init(mesh, policy=policy, timeout=soon)
answer = values(psum(x))
"""
    assert processes.ask(poison) == [[3.0]] * 3
    # Both wait for the third, which never comes. Only the first gives up.
    waiting_ones = [processes[0], processes[1]]

    def are_poisoned():
        for process in waiting_ones:
            process.tell("begin(lambda: str(values(psum(x))))")
        for process in waiting_ones:
            process.hear()
        outcomes = [process.ask("answer = outcome()") for process in waiting_ones]
        assert outcomes == [{"value": "[nan]"}] * 2

    are_poisoned()
    told = processes.ask("answer = attempt(lambda: values(psum(x)))")
    for outcome in told:
        assert f"not done after {waiting.EXPIRES_SECONDS:g} s" in outcome["text"], told
    assert processes.ask(f"jaxcomm.finalize()\n{poison}") == [[3.0]] * 3
    # Where no launcher ends one that cannot answer, the others of its host do.
    processes[2].popen.send_signal(signal.SIGSTOP)
    are_poisoned()
    assert processes[2].ends() == -signal.SIGKILL
