"""Several processes over NCCL: the same results, and who is told of a failure."""

import re

import pytest
import waiting

import jaxcomm

pytestmark = pytest.mark.multiprocess

# Which of them it is depends on where JAX meets the error.
RAISED = ("JaxRuntimeError", "ValueError")


def collectives(here):
    mesh = here.mesh(2, 2, order=[3, 0, 2, 1])
    x = {
        "bfloat16": here.values("bfloat16", (4, 4, 2, 3), 0),
        "int32": here.values("int32", (4, 4, 2, 3), 1),
    }
    found = here.run(mesh, lambda x: here.every(x, "i", 4), x)
    for name, (_, model) in here.models(4).items():
        for dtype, leaf in x.items():
            expected = here.by_group(mesh, ("i",), model, leaf)
            here.identical(mesh, found[name][dtype], expected, f"{name} of {dtype}")
    return [member.transport for member in jaxcomm.communicators()]


def test_every_collective_is_its_model_over_two_processes(team):
    assert team.call(collectives) == [["NCCL 2.32.3"]] * 2


def two_axes(here):
    mesh = here.mesh(2, 2, shape=(2, 2), names=("a", "b"))
    x = here.values("float32", (4, 3), 0)
    # Columns join processes, rows lie within one.
    for axes in (("a",), ("b",)):
        found = here.run(mesh, lambda x, axes=axes: jaxcomm.psum(x, axes), x)
        model = here.model.all_reduce("sum")
        here.identical(mesh, found, here.by_group(mesh, axes, model, x), str(axes))
    members = jaxcomm.communicators()
    by_kernels = [member.stats()["one_shot_calls"] for member in members]
    return [jaxcomm.counters().live, [m.backend for m in members], by_kernels]


def test_axes_within_and_across_processes(team):
    """By this package's kernels: they reach memory of the other process, too."""
    assert team.call(two_axes) == [[2, ["nccl", "nccl"], [1, 1]]] * 2


def ring(here):
    here.load("processes/test_ring_attention.py").attention_in_a_ring(here)
    (member,) = jaxcomm.communicators()
    return [member.backend, sorted(member.stats()["calls"])]


def test_ring_attention_over_two_processes_is_dense_attention(team):
    assert team.call(ring) == [["nccl", ["permute"]]] * 2


PSUM = """
mesh = mesh_of()
psum = jitted(lambda x: jaxcomm.psum(x, "i"), mesh)
x = spread(mesh, 3)
jaxcomm.init(mesh)
answer = [m.backend for m in jaxcomm.communicators()], values(psum(x))
"""
AGAIN = f"jaxcomm.finalize()\n{PSUM}"
STAND_IN = "import ctypes; stand_in = ctypes.CDLL(os.environ['JAXCOMM_NCCL_LIBRARY'])"
RIGHT = [[["nccl"], [1.0]]] * 2
UNTIL_BROKEN = """
(member,) = jaxcomm.communicators()
waiting.until(lambda: member.world.is_broken)
"""
ALONE = "jaxcomm.finalize()\nanswer = psum_of_ones(mesh_of(of_processes(0)))"
WHY = 'answer = jaxcomm.communicators()[0].stats()["one_shot"]'
BY_KERNELS = 'answer = jaxcomm.communicators()[0].stats()["one_shot_calls"]'


@pytest.fixture(scope="module")
def pair(environment, tmp_path_factory, load_test):
    """Two processes of one device each, as in tests/faults."""
    folder = tmp_path_factory.mktemp("pair")
    made = load_test("faults/conftest.py").Set(2, folder, **environment)
    yield made
    made.stop()


@pytest.fixture
def processes(pair):
    """The pair, after a sum that was right; and afterwards another."""
    assert pair.ask(AGAIN) == RIGHT
    yield pair
    assert pair.ask(AGAIN) == RIGHT


ENDED = 70
STOPPED = "the GPUs of this process are stopped, because a collective failed: "


def lines_of(process):
    """Returns what a process said of collectives."""
    return [x for x in process.said().splitlines() if x.startswith("jaxcomm: ")]


def has_ended(process, *texts):
    """Checks that a process ended itself, and said why in one line."""
    assert process.ends() == ENDED, process.said()[-3000:]
    lines = lines_of(process)
    lines = [line for line in lines if line.endswith(". The process ends")]
    assert any(all(text in line for text in texts) for line in lines), lines


def is_stopped(process, outcome, *texts):
    """Checks that a process lost its GPUs, said why, and can make nothing anew."""
    assert outcome.get("error") in RAISED, outcome
    assert "CUDA error 716" in outcome["text"] or texts[-1] in outcome["text"]
    lines = lines_of(process)
    assert any(all(text in line for text in texts) for line in lines), lines
    assert "error" in process.ask("answer = attempt(lambda: values(psum(x)))")
    again = process.ask(
        "jaxcomm.finalize()\nanswer = attempt(lambda: jaxcomm.init(mesh) and 0)"
    )
    assert again["error"] == "CommunicatorError"
    assert again["text"].startswith(STOPPED)
    assert texts[-1] in again["text"]


def psum_by(policy):
    """Returns PSUM with what is to be done where it fails."""
    chosen = f"jaxcomm.init(mesh, policy=jaxcomm.CommPolicy(on_failure={policy!r}))"
    code = PSUM.replace("jaxcomm.init(mesh)", chosen)
    assert chosen in code
    return code


# Of the second process, against a sum of three numbers on the first.
DIFFERENT = {
    "ncclAllReduce: count 3 against 5": (
        "psum(float32[1,5]) over axes ('i',) (lane 'default'",
        "wider = spread(mesh, 5)\nbegin(lambda: values(psum(wider)))",
    ),
    "ncclAllReduce against ncclAllGather": (
        "all_gather(float32[1,3])",
        'other = jitted(lambda x: jaxcomm.all_gather(x, "i"), mesh)\n'
        "begin(lambda: values(other(x)))",
    ),
}
MINE = "psum(float32[1,3]) over axes ('i',) (lane 'default'"


def test_processes_that_do_different_things_end(start):
    """By default, where devices of several processes take part."""
    difference = "ncclAllReduce: count 3 against 5"
    # JAX ends the others when process 0 does: it takes no part.
    processes = start(3, JAX_ENABLE_RECOVERABILITY="1")
    # All are to say which devices they have.
    processes.ask("mesh_of()")
    some = PSUM.replace("mesh_of()", "mesh_of(of_processes(1, 2))")
    assert processes.ask(some, [1, 2]) == RIGHT
    second_s, code = DIFFERENT[difference]
    processes[1].tell("begin(lambda: values(psum(x)))")
    processes[2].tell(code)
    differ = f"disagree about {difference}"
    told = 0
    for rank, call in enumerate((MINE, second_s)):
        # Who learns later may learn that the other has ended.
        process = processes[1 + rank]
        process.ends()
        is_told = differ in process.said()
        told += is_told
        has_ended(
            process,
            call,
            f"rank {rank} of 2 (device ",
            differ if is_told else f"process {2 - rank} (rank {1 - rank}) has ended",
        )
    assert told


def test_processes_that_do_different_things_lose_their_gpus(start):
    difference = "ncclAllReduce against ncclAllGather"
    processes = start(2)
    assert processes.ask(psum_by("raise")) == RIGHT
    second_s, code = DIFFERENT[difference]
    processes[0].tell("begin(lambda: values(psum(x)))")
    processes[1].tell(code)
    for rank, call in enumerate((MINE, second_s)):
        processes[rank].hear()
        outcome = processes[rank].ask("answer = outcome()")
        is_stopped(
            processes[rank],
            outcome,
            call,
            f"rank {rank} of 2 (device ",
            f"disagree about {difference}",
        )


def test_small_sums_are_nccl_s_on_all_where_one_process_cannot_do_them(start):
    """Its GPU has not the kernel, or reaches no other's memory; and then it can."""
    processes = start(2, JAXCOMM_FAKE_KERNELS="1")
    processes.ask("mesh = mesh_of()")
    # The kernels that stop a GPU are there before that of sums is asked for.
    assert processes.ask(AGAIN) == RIGHT
    assert processes.ask(BY_KERNELS) == [1] * 2
    for function in ("cuModuleGetFunction", "cuIpcGetMemHandle", "cuIpcOpenMemHandle"):
        for name in (function, f"{function}_v2"):
            processes[1].ask(
                f"{STAND_IN}; stand_in.jaxcommFakeFail({name.encode()}, 0, 1)"
            )
        assert processes.ask(AGAIN) == RIGHT
        assert processes.ask(BY_KERNELS) == [0] * 2
        reasons = processes.ask(WHY)
        assert reasons[0] == "no: rank 1 cannot"
        assert reasons[1].startswith(f"no: {function}: ")
    assert processes.ask(AGAIN) == RIGHT
    assert processes.ask(BY_KERNELS) == [1] * 2
    assert processes.ask(WHY) == ["yes"] * 2


IMPATIENT = """
from types import SimpleNamespace
from jaxcomm.communicator.backends.nccl import communicators as nccl
nccl.config = SimpleNamespace(**vars(jaxcomm.config))
nccl.config.timeout_seconds = lambda: waiting.EXPIRES_SECONDS
"""


def test_a_gpu_that_refuses_our_kernels_makes_no_communicator(start):
    """Without them it could not be stopped."""
    processes = start(2)
    processes.ask("mesh = mesh_of()")
    processes[1].ask(f"{STAND_IN}; stand_in.jaxcommFakeFail(b'cuModuleLoadData', 0, 1)")
    # It waits for the other in NCCL, once both have met.
    processes[0].ask(IMPATIENT)
    answers = processes.ask("answer = attempt(lambda: jaxcomm.init(mesh) and 0)")
    processes[0].ask("nccl.config = jaxcomm.config")
    late = f"not done after {waiting.EXPIRES_SECONDS:g} s"
    for outcome, text in zip(answers, (late, "cuModuleLoadData: "), strict=True):
        assert outcome.get("error") == "CommunicatorError", outcome
        assert text in outcome["text"]
    assert processes.ask("answer = jaxcomm.counters().live") == [0, 0]
    assert processes.ask(AGAIN) == RIGHT


def test_a_process_killed_between_operations_is_an_error_of_the_next(start):
    processes = start(2, JAX_ENABLE_RECOVERABILITY="1")
    processes.ask(PSUM)
    processes[1].kill()
    processes[1].ends()
    processes[0].ask(UNTIL_BROKEN)
    outcome = processes[0].ask("answer = attempt(lambda: values(psum(x)))")
    assert "process 1 (rank 1) has ended" in str(outcome)
    assert "psum(float32[1,3]) over axes ('i',), rank 0 of 2" in str(outcome)
    assert processes[0].ask(ALONE) == 1


def test_a_creation_that_fails_on_one_process_ends_on_all(processes):
    processes.ask("jaxcomm.finalize()")
    processes[1].ask(f"{STAND_IN}; stand_in.jaxcommFakeFail(b'ncclCommSplit', 0, 3)")
    answers = processes.ask(
        f"soon = {waiting.EXPIRES_SECONDS}\n"
        "answer = attempt(lambda: jaxcomm.init(mesh, timeout=soon) and 0)"
    )
    for outcome in answers:
        assert outcome.get("error") == "CommunicatorError", outcome
        assert "NCCL did not make a communicator over axes ('i',)" in outcome["text"]


def test_processes_that_make_communicators_in_different_orders_are_told(processes):
    """Before NCCL is asked, which would wait for ever."""
    processes.ask("jaxcomm.finalize()")
    for process, lane in zip(processes, ("keys", "values"), strict=True):
        process.tell(
            f"answer = attempt(lambda: jaxcomm.init(mesh, lanes={lane!r}) and 0)"
        )
    outcomes = [process.hear() for process in processes]
    for outcome in outcomes:
        assert outcome.get("error") == "CommunicatorError", outcome
        text = outcome["text"]
        assert "processes [0, 1] are out of step" in text
        for number, lane in enumerate(("keys", "values")):
            assert (
                f"process {number} is to make a communicator over axes ('i',), "
                f"lane {lane!r}, "
            ) in text
        assert re.search(r"its number \d+; process 1 ", text), text
    # Nothing was made, and both go on.
    assert processes.ask("answer = jaxcomm.counters().live") == [0, 0]


def test_a_communicator_of_another_policy_is_another(processes):
    processes.ask("jaxcomm.finalize()")
    for process, ctas in zip(processes, (2, 4), strict=True):
        process.tell(
            f"policy = jaxcomm.CommPolicy(max_ctas={ctas})\n"
            f"answer = attempt(lambda: jaxcomm.init(mesh, policy=policy) and 0)"
        )
    for process in processes:
        text = process.hear()["text"]
        assert "'maxCTAs': 2" in text
        assert "'maxCTAs': 4" in text


def test_a_process_without_nccl_is_named_by_all(processes):
    processes.ask("jaxcomm.finalize()")
    processes[1].ask("named = os.environ.pop('JAXCOMM_NCCL_LIBRARY')")
    answers = processes.ask("answer = attempt(lambda: jaxcomm.init(mesh) and 0)")
    processes[1].ask("os.environ['JAXCOMM_NCCL_LIBRARY'] = named")
    for outcome in answers:
        assert outcome.get("error") == "CommunicatorError", outcome
        text = "process 1: NCCL serves NVIDIA GPUs, not cpu devices"
        assert text in outcome["text"]


CALLS = """
mesh = mesh_of()
x = spread(mesh, 3)
psum = jitted(lambda x: jaxcomm.psum(x, "i"), mesh)
gather = jitted(lambda x: jaxcomm.all_gather(x, "i"), mesh)
answer = values(psum(x))
"""


def test_processes_that_call_different_things_all_hear_who_is_odd(start):
    processes = start(2, JAXCOMM_CHECK="1")
    assert processes.ask(CALLS)
    for process, call in zip(processes, ("gather", "psum"), strict=True):
        process.tell(f"answer = attempt(lambda: values({call}(x)))")
    for process in processes:
        text = process.hear()["text"]
        assert "JAXCOMM_CHECK: ranks disagree: rank 1 calls psum(" in text
        assert "where rank 0 calls all_gather(" in text


def test_processes_that_do_not_all_check_are_told(start):
    processes = start(2)
    processes[1].ask("import os; os.environ['JAXCOMM_CHECK'] = '1'")
    for outcome in processes.ask("answer = attempt(lambda: jaxcomm.init(mesh_of()))"):
        assert outcome.get("error") == "CommunicatorError", outcome
        assert "checked" in outcome["text"]
