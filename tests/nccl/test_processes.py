"""Several processes over NCCL: the same results, and who is told of a failure."""

import pathlib
import re
import time

import jax
import pytest

import jaxcomm
from jaxcomm.communicator import rendezvous

pytestmark = pytest.mark.multiprocess

# Which of them it is depends on where JAX meets the error.
RAISED = ("JaxRuntimeError", "ValueError")
# Of what is to happen at once, for a machine that has more to do than these tests.
PATIENCE_SECONDS = 30


def collectives(here, order):
    mesh = here.mesh(2, 2, order=order)
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


@pytest.mark.parametrize("order", [None, [3, 0, 2, 1]], ids=["line", "disorder"])
def test_every_collective_is_its_model_over_two_processes(team, order):
    assert team.call(collectives, order=order) == [["NCCL 2.32.3"]] * 2


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


def watched(here):
    others = rendezvous.peers((0, 1), jax.process_index())
    return [
        (process, pathlib.Path(f"/proc/{pid}/task/{thread}").exists())
        for pid, _, process, thread in others
    ]


def test_each_watches_a_thread_of_the_other_that_ends_first(team):
    assert team.call(watched) == [[[1, True]], [[0, True]]]


def ring(here):
    attention = here.load("processes/test_ring_attention.py")
    attention.attention_in_a_ring(here, 2, 2, None, "zigzag", True)
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
# A live communicator for whose operations a rank waits less long: for those that hang.
# What is to succeed takes the time it takes.
SOON = "jaxcomm.finalize()\njaxcomm.init(mesh, timeout=5)"
# The watch may be slow to look on a machine with other work. Then a call would go on
# its way.
UNTIL_BROKEN = """
(member,) = jaxcomm.communicators()
deadline = time.monotonic() + 60
while not member.world.is_broken:
    assert time.monotonic() < deadline, "nobody noticed the end of the other process"
    time.sleep(0.001)
"""
ALONE = "jaxcomm.finalize()\nanswer = psum_of_ones(mesh_of(of_processes(0)))"
WHY = 'answer = jaxcomm.communicators()[0].stats()["one_shot"]'
BY_KERNELS = 'answer = jaxcomm.communicators()[0].stats()["one_shot_calls"]'


@pytest.fixture(scope="module")
def pair(environment, tmp_path_factory, load_test):
    """Two processes of one device each, as in tests/faults."""
    folder = tmp_path_factory.mktemp("pair")
    made = load_test("faults/conftest.py").Set(2, folder, timeout=60, **environment)
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
    assert process.ends(PATIENCE_SECONDS) == ENDED, process.said()[-3000:]
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


@pytest.mark.parametrize("difference", DIFFERENT)
def test_processes_that_do_different_things_end(start, difference):
    """By default, where devices of several processes take part."""
    # JAX ends the others when process 0 does: it takes no part.
    processes = start(3, timeout=60, JAX_ENABLE_RECOVERABILITY="1")
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
        process.ends(PATIENCE_SECONDS)
        is_told = differ in process.said()
        told += is_told
        has_ended(
            process,
            call,
            f"rank {rank} of 2 (device ",
            differ if is_told else f"process {2 - rank} (rank {1 - rank}) has ended",
        )
    assert told


@pytest.mark.parametrize("difference", DIFFERENT)
def test_processes_that_do_different_things_lose_their_gpus(start, difference):
    processes = start(2, timeout=60)
    assert processes.ask(psum_by("raise")) == RIGHT
    second_s, code = DIFFERENT[difference]
    begin = time.monotonic()
    processes[0].tell("begin(lambda: values(psum(x)))")
    processes[1].tell(code)
    for rank, call in enumerate((MINE, second_s)):
        processes[rank].hear()
        outcome = processes[rank].ask("answer = outcome()")
        assert outcome["end"] - begin < PATIENCE_SECONDS
        is_stopped(
            processes[rank],
            outcome,
            call,
            f"rank {rank} of 2 (device ",
            f"disagree about {difference}",
        )


def test_a_rank_that_stays_away_is_a_deadline_with_a_record(start, tmp_path):
    processes = start(
        2, timeout=60, JAXCOMM_DUMP_DIR=str(tmp_path), JAX_ENABLE_RECOVERABILITY="1"
    )
    assert processes.ask(PSUM) == RIGHT
    processes.ask(SOON)
    processes[1].tell("answer = attempt(lambda: values(psum(x)))")
    has_ended(
        processes[1],
        "psum(float32[1,3]) over axes ('i',) (lane 'default'",
        "rank 1 of 2",
        "not done after 5 s",
        "see JAXCOMM_TIMEOUT",
    )
    record = (tmp_path / "flight-record-1.json").read_text()
    assert "psum" in record
    assert "process ended" in record
    # The one that stayed away has nothing on its way, and keeps its GPUs.
    processes[0].ask(UNTIL_BROKEN)
    outcome = processes[0].ask("answer = attempt(lambda: values(psum(x)))")
    assert outcome.get("error") in RAISED, outcome
    assert "process 1 (rank 1) has ended" in outcome["text"]
    assert "Nothing was on its way" in outcome["text"]
    assert processes[0].ask(ALONE) == 1


@pytest.mark.parametrize("policy", [None, "raise"])
@pytest.mark.parametrize("kernels", [0, 1])
def test_who_waits_for_a_killed_process_is_told_at_once(start, kernels, policy):
    """In NCCL, and in this package's own kernel for small sums."""
    processes = start(
        2, timeout=60, JAX_ENABLE_RECOVERABILITY="1", JAXCOMM_FAKE_KERNELS=str(kernels)
    )
    assert processes.ask(psum_by(policy)) == RIGHT
    assert processes.ask(BY_KERNELS) == [kernels] * 2
    processes[0].ask("begin(lambda: values(psum(x)))")
    since = processes[1].kill()
    texts = MINE, "rank 0 of 2", "process 1 (rank 1) has ended"
    if policy is None:
        # Long before the deadline.
        has_ended(processes[0], *texts)
        return
    outcome = processes[0].ask("answer = outcome()")
    assert outcome["end"] - since < PATIENCE_SECONDS
    is_stopped(processes[0], outcome, *texts)


def test_an_error_that_nccl_returns_names_the_process_that_ended(start):
    """NCCL may notice before the watch does, and does not say which it was.

    The call waits a moment for the watch, so nothing is to lie between it and the kill.
    """
    processes = start(2, timeout=60, JAX_ENABLE_RECOVERABILITY="1")
    assert processes.ask(PSUM) == RIGHT
    # A remote error, of the next call.
    processes[0].ask(f"{STAND_IN}; stand_in.jaxcommFakeFail(b'ncclAllReduce', 0, 6)")
    outcome = processes[0].ask(
        f"os.kill({processes[1].pid}, signal.SIGKILL)\n"
        "answer = attempt(lambda: values(psum(x)))"
    )
    assert outcome.get("error") in RAISED, outcome
    assert "process 1 (rank 1) has ended" in outcome["text"]
    assert "Nothing was on its way" in outcome["text"]


def test_small_sums_are_nccl_s_on_all_where_one_process_cannot_do_them(start):
    """Its GPU has not the kernel, or reaches no other's memory; and then it can."""
    processes = start(2, timeout=60, JAXCOMM_FAKE_KERNELS="1")
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


def test_a_gpu_that_refuses_our_kernels_makes_no_communicator(start):
    """Without them it could not be stopped."""
    processes = start(2, timeout=60)
    processes.ask("mesh = mesh_of()")
    processes[1].ask(f"{STAND_IN}; stand_in.jaxcommFakeFail(b'cuModuleLoadData', 0, 1)")
    # In which both meet first.
    processes.ask("os.environ['JAXCOMM_TIMEOUT'] = '5'")
    answers = processes.ask("answer = attempt(lambda: jaxcomm.init(mesh) and 0)")
    processes.ask("os.environ['JAXCOMM_TIMEOUT'] = '60'")
    for outcome, text in zip(
        answers, ("not done after 5 s", "cuModuleLoadData: "), strict=True
    ):
        assert outcome.get("error") == "CommunicatorError", outcome
        assert text in outcome["text"]
        assert outcome["end"] - outcome["begin"] < PATIENCE_SECONDS
    assert processes.ask("answer = jaxcomm.counters().live") == [0, 0]
    assert processes.ask(AGAIN) == RIGHT


def test_a_process_killed_between_operations_is_an_error_of_the_next(start):
    processes = start(2, timeout=60, JAX_ENABLE_RECOVERABILITY="1")
    processes.ask(PSUM)
    processes[1].kill()
    processes[1].popen.wait(PATIENCE_SECONDS)
    processes[0].ask(UNTIL_BROKEN)
    outcome = processes[0].ask("answer = attempt(lambda: values(psum(x)))")
    assert "process 1 (rank 1) has ended" in str(outcome)
    assert "psum(float32[1,3]) over axes ('i',), rank 0 of 2" in str(outcome)
    assert processes[0].ask(ALONE) == 1


def test_a_process_that_does_not_come_is_named(start):
    # Both come in this time, and the other never does.
    processes = start(3, timeout=5)
    processes.ask("mesh = mesh_of()")
    answers = processes.ask(
        "answer = attempt(lambda: jaxcomm.init(mesh) and 0)", [0, 2]
    )
    for outcome in answers:
        assert outcome.get("error") == "CommunicatorError", outcome
        assert "waited 5 s for process 1 of [0, 1, 2]" in outcome["text"]
        assert outcome["end"] - outcome["begin"] < PATIENCE_SECONDS
    processes.ask("os.environ['JAXCOMM_TIMEOUT'] = '60'")
    assert processes.ask(AGAIN) == [[["nccl"], [3.0]]] * 3


def test_a_creation_that_fails_on_one_process_ends_on_all(processes):
    processes.ask("jaxcomm.finalize()")
    processes[1].ask(f"{STAND_IN}; stand_in.jaxcommFakeFail(b'ncclCommSplit', 0, 3)")
    answers = processes.ask(
        "answer = attempt(lambda: jaxcomm.init(mesh, timeout=2) and 0)"
    )
    for outcome in answers:
        assert outcome.get("error") == "CommunicatorError", outcome
        assert "NCCL did not make a communicator over axes ('i',)" in outcome["text"]
        assert outcome["end"] - outcome["begin"] < PATIENCE_SECONDS


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


def test_poison_across_processes_is_refused_by_all(processes):
    """What an aborted operation has sent to another process is computed with there."""
    processes.ask("jaxcomm.finalize()")
    for outcome in processes.ask(
        'policy = jaxcomm.CommPolicy(on_failure="poison")\n'
        "answer = attempt(lambda: jaxcomm.init(mesh_of(), policy=policy) and 0)"
    ):
        assert outcome.get("error") == "CommunicatorError", outcome
        assert "on_failure='poison') needs all devices" in outcome["text"]
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
