"""A rank that stays away is an error on the others, and the next program runs.

The programs run in one process of their own, which a bug could leave hanging.
"""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = r"""
import json, os, threading, time

os.environ["JAXCOMM_TIMEOUT"] = "2"
import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm

mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,),
                     devices=jax.devices()[:4])
P = jax.P
x = jnp.arange(4.0)
report = {}


def run(call, x=x, mesh=mesh, axes="i"):
    program = jax.shard_map(call, mesh=mesh, in_specs=P(axes), out_specs=P(axes),
                            check_vma=False)
    return np.asarray(jax.jit(program)(x)).tolist()


def failures():
    return sum(entry.state == "failed"
               for communicator in jaxcomm.flight_record().process.communicators
               for entry in communicator.entries)


def attempt(name, *args, **options):
    global failures_before
    failures_before = failures()
    begin = time.monotonic()
    try:
        report[name] = {"result": run(*args, **options)}
    except BaseException as error:
        report[name] = {"type": type(error).__name__, "text": str(error)}
    report[name]["seconds"] = time.monotonic() - begin
    # The same communicator serves the next program.
    report[name]["next"] = run(lambda x: jaxcomm.psum(x, "i"))
    report[name]["in_flight"] = sum(
        c.stats()["in_flight"] for c in jaxcomm.communicators())


def one_gave_up():
    while failures() == failures_before:
        time.sleep(0.005)
    # Of several errors JAX shows the first: not this rank's own.
    time.sleep(1)


def late(rank, until, then):
    # Holds one rank up, as a rank does that computes something else.
    def wait(i):
        if int(i) == rank:
            until()
        return np.float32(0)

    def call(x):
        me = jax.lax.axis_index("i")
        zero = jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32), me)
        return then(x + zero)

    return call


attempt("psum", late(2, one_gave_up, lambda x: jaxcomm.psum(x, "i")))
attempt("all_gather", late(
    0, one_gave_up, lambda x: jaxcomm.all_gather(x, "i", tiled=True)))
attempt("ppermute", late(3, one_gave_up, lambda x: jaxcomm.ppermute(
    x, "i", [(0, 1), (1, 0), (3, 2), (2, 3)])))


def branches(first, second):
    def call(x):
        return jax.lax.cond(jax.lax.axis_index("i") < 2, first, second, x)

    return call


attempt("different collectives", branches(
    lambda x: jaxcomm.psum(x, "i"),
    lambda x: jaxcomm.ppermute(x, "i", [(0, 1), (1, 2), (2, 3), (3, 0)])))
attempt("one branch without", branches(lambda x: jaxcomm.pmax(x, "i"), lambda x: x))
attempt("the same in both", branches(
    lambda x: jaxcomm.psum(x, "i"), lambda x: jaxcomm.psum(x, "i")))

lane_report = {}
grid = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2,
                     devices=jax.devices()[:4])


def only_one_group(x):
    # Devices of column 1 never meet: their group alone fails.
    a, b = jax.lax.axis_index("a"), jax.lax.axis_index("b")
    return jax.lax.cond((b == 1) & (a == 0), lambda x: x,
                        lambda x: jaxcomm.psum(x, "a", lane="grads"), x)


attempt("a group of several", only_one_group, mesh=grid, axes=("a", "b"))

# A deadline of its own.
os.environ["JAXCOMM_TIMEOUT"] = "60"
jaxcomm.init(mesh, "i", lanes="hasty", timeout=2)
attempt("own deadline", late(
    2, one_gave_up, lambda x: jaxcomm.psum(x, "i", lane="hasty")))
jaxcomm.init(mesh, "i", lanes="patient")
attempt("in time", late(
    2, lambda: time.sleep(0.1), lambda x: jaxcomm.psum(x, "i", lane="patient")))

# Closing while three ranks wait; the fourth comes when it is closed.
closed = threading.Event()


def close_when_waiting():
    (doomed,) = (c for c in jaxcomm.communicators() if c.lane == "doomed")
    waiting = set()
    while waiting != {0, 2, 3}:
        time.sleep(0.005)
        (record,) = jaxcomm.flight_record(doomed).process.communicators
        waiting = {entry.rank for entry in record.entries}
    doomed.close()
    closed.set()


jaxcomm.finalize()
jaxcomm.init(mesh, "i", lanes="doomed")
closer = threading.Thread(target=close_when_waiting)
closer.start()
attempt("closed while waiting", late(
    1, lambda: closed.wait(60), lambda x: jaxcomm.psum(x, "i", lane="doomed")))
closer.join()


# The communicator is made anew before the last rank of a run that failed has come.
def made_anew(name, lane, close_early):
    jaxcomm.finalize()
    jaxcomm.init(mesh, "i", lanes=lane)
    psum = lambda x: jaxcomm.psum(x, "i", lane=lane)

    def busy(x):  # A second or more on rank 3. A callback would hold this thread up.
        steps = jnp.where(jax.lax.axis_index("i") == 3, 100_000_000, 0)
        return psum(x + 0 * jax.lax.fori_loop(0, steps, lambda _, y: jnp.sin(y), x))

    sharded = lambda call: jax.jit(jax.shard_map(
        call, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
    placed = jax.device_put(x, jax.NamedSharding(mesh, P("i")))
    programs = [sharded(call).lower(placed).compile() for call in (busy, psum)]
    (member,) = (c for c in jaxcomm.communicators() if c.lane == lane)
    if close_early:
        member.close()
    started = programs[0](placed)
    if not close_early:
        while member.stats()["bytes"] < 3 * 4:
            time.sleep(0.005)
        member.close()
    begin = time.monotonic()
    report[name] = {}
    try:
        np.asarray(started.addressable_shards[0].data)
    except Exception as error:
        report[name] = {"type": type(error).__name__, "text": str(error)}
    jaxcomm.init(mesh, "i", lanes=lane)
    report[name]["late"] = not started.addressable_shards[3].data.is_ready()
    report[name]["next"] = np.asarray(programs[1](placed)).tolist()
    report[name]["seconds"] = time.monotonic() - begin
    report[name]["in_flight"] = sum(
        c.stats()["in_flight"] for c in jaxcomm.communicators())


os.environ["JAXCOMM_TIMEOUT"] = "40"
made_anew("made anew after a close", "early", True)
made_anew("made anew while one waits", "while", False)
print("REPORT" + json.dumps(report))
"""


@pytest.fixture(scope="module")
def report():
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    (line,) = [s for s in ran.stdout.splitlines() if s.startswith("REPORT")]
    return json.loads(line.removeprefix("REPORT"))


FAILING = (
    "psum", "all_gather", "ppermute", "different collectives", "one branch without",
    "a group of several", "own deadline", "closed while waiting",
    "made anew after a close", "made anew while one waits",
)  # fmt: skip


@pytest.mark.parametrize("case", FAILING)
def test_a_failure_is_an_error_and_the_next_program_runs(report, case):
    assert report[case].get("type") == "JaxRuntimeError", report[case]
    assert report[case]["next"] == [6.0] * 4
    assert report[case]["in_flight"] == 0


def test_the_waiting_ranks_name_the_missing_one(report):
    """Any waiting rank's error may be the one that JAX shows."""
    text = report["psum"]["text"]
    assert "DEADLINE_EXCEEDED" in text
    assert "psum(float32[1]) over axes ('i',): rank " in text
    assert " of 4 (cpu:" in text
    assert "waited 2 s for rank 2. They may have stopped" in text
    assert "JAXCOMM_TIMEOUT" in text
    assert "all_gather(float32[1])" in report["all_gather"]["text"]
    assert "for rank 0." in report["all_gather"]["text"]


def test_a_permutation_waits_for_its_own_source_alone(report):
    text = report["ppermute"]["text"]
    assert "rank 2 of 4" in text
    assert "for rank 3." in text


def test_the_error_comes_at_the_deadline(report):
    """2 s; no rank is there whose own return would end the wait."""
    assert report["psum"]["seconds"] > 1.8
    assert report["one branch without"]["seconds"] < 60


def test_a_rank_that_is_late_but_in_time_spoils_nothing(report):
    assert report["in time"].get("result") == [6.0] * 4


def test_different_collectives_in_the_branches_are_both_named(report):
    text = report["different collectives"]["text"]
    assert "psum(float32[1])" in text
    assert "ppermute(float32[1])" in text
    assert "jax.lax.cond on axis_index" in text


def test_the_same_collective_in_two_branches_says_what_is_wrong(report):
    """Two call sites never meet, though they look alike."""
    case = report["the same in both"]
    assert (
        case.get("result") == [6.0] * 4 or "jax.lax.cond on axis_index" in case["text"]
    )


def test_an_error_names_axes_and_rank_within_the_group(report):
    text = report["a group of several"]["text"]
    assert "psum(float32[1]) over axes ('a',): rank 1 of 2 (cpu:3)" in text
    assert "for rank 0." in text


def test_a_communicator_may_have_a_deadline_of_its_own(report):
    assert report["own deadline"]["type"] == "JaxRuntimeError"
    assert "waited 2 s for rank 2" in report["own deadline"]["text"]


def test_closing_a_communicator_wakes_who_waits_in_it(report):
    # XLA reports the error of one rank: of one that waited or of the one that came
    # afterwards. Had the others not been woken, they would have waited for 60 s.
    waited = "the communicator over axes ('i',) (lane 'doomed') was closed"
    came = "psum(float32[1]) over axes ('i',): its communicator is closed"
    text = report["closed while waiting"]["text"]
    assert waited in text or came in text
    assert report["closed while waiting"]["seconds"] < 30


@pytest.mark.parametrize("case", ["after a close", "while one waits"])
def test_a_late_rank_of_a_failed_run_does_not_wait_in_the_new_communicator(
    report, case
):
    """There it would hold its device up until the deadline, 40 s."""
    assert report[f"made anew {case}"]["late"]
    assert report[f"made anew {case}"]["seconds"] < 20
