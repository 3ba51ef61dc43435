"""A rank that stays away is an error on the others, and the next program runs.

The programs run in one process of their own, which a bug could leave hanging. A rank
stays away by taking the other branch of a cond, or comes once the others have stopped
waiting. So no result depends on how long anything takes.
"""

import json
import os
import sys

import forked
import pytest
import waiting

PROGRAM = r"""
import json

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm
import waiting

auto = (jax.sharding.AxisType.Auto,)
mesh = jax.make_mesh((4,), ("i",), axis_types=auto, devices=jax.devices()[:4])
P = jax.P
x = jnp.arange(4.0)
report = {}


def jitted(call):
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P("i"), out_specs=P("i"),
                                 check_vma=False))


def entries(state):
    return [entry for communicator in jaxcomm.flight_record().process.communicators
            for entry in communicator.entries if entry.state == state]


def result_of(program):
    # None if it took too long: on a busy machine ranks may come seconds apart.
    try:
        return np.asarray(program(x)).tolist()
    except jax.errors.JaxRuntimeError as error:
        assert "waited 2 s" in str(error) or "stopped waiting" in str(error), error


def attempt(name, call):
    report[name] = {}
    try:
        report[name]["result"] = np.asarray(jitted(call)(x)).tolist()
    except jax.errors.JaxRuntimeError as error:
        report[name]["error"] = str(error)
    # The same communicator serves the next program.
    after = jitted(psum)
    report[name]["next"] = waiting.until(lambda: result_of(after))
    report[name]["in_flight"] = sum(
        c.stats()["in_flight"] for c in jaxcomm.communicators())


def without(rank, call, instead=lambda x: x):
    # One rank does something else.
    return lambda x: jax.lax.cond(jax.lax.axis_index("i") == rank, instead, call, x)


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


psum = lambda x: jaxcomm.psum(x, "i")
jaxcomm.init(mesh, "i", timeout=waiting.EXPIRES_SECONDS)
attempt("psum", without(2, psum))
attempt("different collectives", without(2, psum, lambda x: jaxcomm.ppermute(
    x, "i", [(0, 1), (1, 2), (2, 3), (3, 0)])))
before = len(entries("failed"))
attempt("late", late(2, lambda: waiting.until(
    lambda: len(entries("failed")) == before + 3), psum))

print("REPORT" + json.dumps(report))
"""


@pytest.fixture(scope="module")
def report():
    ran = forked.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=2 * waiting.HANG_SECONDS,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    (line,) = [s for s in ran.stdout.splitlines() if s.startswith("REPORT")]
    return json.loads(line.removeprefix("REPORT"))


pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
# Of each case that fails, what is said.
SAID = {
    "psum": [
        "DEADLINE_EXCEEDED", "psum(float32[1]) over axes ('i',): rank ", " of 4 (cpu:",
        "waited 2 s for rank 2. They may have stopped", "JAXCOMM_TIMEOUT",
    ],
    "different collectives": [
        "psum(float32[1])", "ppermute(float32[1])", "jax.lax.cond on axis_index",
    ],
    "late": [],
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_a_failure_is_an_error_and_the_next_program_runs(report, case):
    found = report[case]
    for text in SAID[case]:
        assert text in found["error"]
    assert "result" not in found
    assert found["next"] == [6.0] * 4
    assert found["in_flight"] == 0
