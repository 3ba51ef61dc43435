"""Overlap, and ranks that stay away or fail between the halves.

The programs run in one process of their own, which a bug could leave hanging.
"""

import json
import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.host_only(
    reason="over NCCL a stream waits: tests/ffi/fake_nccl_split_phase_test.cc"
)

PROGRAM = r"""
import json, os, threading, time

os.environ["JAXCOMM_TIMEOUT"] = "60"
import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm

mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,),
                     devices=jax.devices()[:2])
report = {"log": []}
computed = threading.Event()


def slow(until):
    def wait(rank):
        if int(rank) == 1:
            until()
        return np.float32(0)

    return lambda: jax.pure_callback(
        wait, jax.ShapeDtypeStruct((), np.float32), jax.lax.axis_index("i"))


def note(x):
    def write(rank, x):
        report["log"].append(int(rank))
        computed.set()
        return np.float32(x)

    return jax.pure_callback(write, jax.ShapeDtypeStruct((), np.float32),
                             jax.lax.axis_index("i"), x)


def fail(x):
    def refuse(rank, x):
        if int(rank) == 0:
            raise RuntimeError("out of luck")
        time.sleep(0.2)
        return np.float32(x)

    return jax.pure_callback(refuse, jax.ShapeDtypeStruct((), np.float32),
                             jax.lax.axis_index("i"), x)


def run(late, between, in_a_loop=False):
    def step(x):
        handle = jaxcomm.ppermute_start(x + late(), "i", [(0, 1), (1, 0)])
        y = jnp.cumsum(x @ x.T, 1) @ x
        return handle.done(after=(y, between(y.sum())))

    def call(x):
        if in_a_loop:
            return jax.lax.fori_loop(0, 3, lambda k, x: step(x), x)
        return step(x)

    spread = jax.NamedSharding(mesh, jax.P("i"))
    x = jax.device_put(jnp.arange(64.0 * 16).reshape(64, 16) / 1000, spread)
    program = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=jax.P("i"),
                                    out_specs=jax.P("i"), check_vma=False))
    program = program.lower(x).compile()
    report["log"].clear()
    computed.clear()
    try:
        outcome = np.asarray(program(x)).tolist() == np.roll(x, 32, 0).tolist()
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    return {"outcome": outcome, "log": list(report["log"]),
            "in_flight": sum(c.stats()["in_flight"]
                             for c in jaxcomm.communicators())}


def failures():
    return sum(entry.state == "failed"
               for communicator in jaxcomm.flight_record().process.communicators
               for entry in communicator.entries)


def other_gave_up():
    # That of an earlier run does not count.
    while failures() == failures_before:
        time.sleep(0.005)
    # Of two errors JAX shows the first: not this rank's own.
    time.sleep(1)


in_time = slow(lambda: None)
report["first"] = run(in_time, note)
report["overlap"] = run(slow(lambda: computed.wait(30)), note)
jaxcomm.finalize()
jaxcomm.init(mesh, "i", timeout=2)
failures_before = failures()
report["missing"] = run(slow(other_gave_up), note)
report["then"] = run(in_time, note)
report["raises"] = run(slow(lambda: time.sleep(0.2)), fail)
# Longer than a rank waits.
time.sleep(2.5)
report["after that"] = run(in_time, note)
failures_before = failures()
report["in a loop"] = run(slow(other_gave_up), note, in_a_loop=True)
report["at last"] = run(in_time, note)
print("REPORT" + json.dumps(report))
"""


@pytest.fixture(scope="module")
def report():
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"JAXCOMM_DUMP_DIR": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.split("REPORT")[1])


def test_computes_while_the_other_rank_is_missing(report):
    assert report["overlap"]["outcome"] is True
    # Rank 1 comes when rank 0 has computed, which does not wait for it before its done.
    assert report["overlap"]["log"] == [0, 1]


@pytest.mark.parametrize("case", ["missing", "in a loop"])
def test_a_rank_that_stays_away_is_an_error_on_the_others(report, case):
    outcome = report[case]["outcome"]
    assert "DEADLINE_EXCEEDED" in outcome
    assert re.search(
        r"ppermute_start\(float32\[32,16\]\) over axes \('i',\): rank 0 of 2 \(cpu:0\) "
        r"waited 2 s for rank 1",
        outcome,
    )
    assert report[case]["in_flight"] == 0


def test_an_error_between_the_halves_is_that_error(report):
    assert "out of luck" in report["raises"]["outcome"]
    assert report["raises"]["in_flight"] == 0


@pytest.mark.parametrize("case", ["first", "then", "after that", "at last"])
def test_later_programs_run(report, case):
    assert report[case]["outcome"] is True
    assert report[case]["in_flight"] == 0
