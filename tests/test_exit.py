"""C3: nobody must finalize. The process ends with its own status, at once."""

import os
import signal
import subprocess

import pytest
import waiting

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

START = r"""
import atexit, sys, threading
import jax
import jax.numpy as jnp
import numpy as np

rank_1_comes = threading.Event()
in_flight = lambda: 0


def at_exit():
    # Called after jaxcomm's own end, which wakes the ranks that wait for rank 1.
    try:
        waiting.until(lambda: not in_flight(), "the end of those that wait")
    finally:
        rank_1_comes.set()


atexit.register(at_exit)
import jaxcomm
import waiting

mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,),
                     devices=jax.devices()[:4])
spec = jax.P("i")


def jitted(call):
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec,
                                 check_vma=False))


program = jitted(lambda x: jaxcomm.psum(x, "i"))
x = jnp.arange(4.0)
jax.block_until_ready(program(x))


def wait(i):
    if int(i) == 1:
        waiting.event(rank_1_comes)
    return np.float32(0)


def half_arrived(x):
    late = jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32),
                             jax.lax.axis_index("i"))
    return jaxcomm.psum(x + late, "i")


def begin_half_arrived():
    global in_flight
    (member,) = jaxcomm.communicators()
    in_flight = lambda: member.stats()["in_flight"]
    out = jitted(half_arrived)(x)
    waiting.until(in_flight)
    return out
"""

ENDINGS = {
    "with work in flight": ("out = [program(x) for _ in range(50)]", 0, ""),
    "in the middle of a collective": ("out = begin_half_arrived()", 0, ""),
    "by an exception in the middle of a collective": (
        "out = begin_half_arrived(); raise KeyError('mine')", 1, "KeyError: 'mine'"
    ),
    "after finalize and a failed collective": (
        "jaxcomm.finalize()\n"
        "try: jax.block_until_ready(program(x))\n"
        "except jax.errors.JaxRuntimeError as e: assert 'jaxcomm.init' in str(e)\n"
        "sys.exit(7)",
        7,
        "",
    ),
}  # fmt: skip


@pytest.fixture
def start(compiled_once, piped):
    def start(code):
        timeout = {"JAXCOMM_TIMEOUT": str(waiting.HANG_SECONDS)}
        environment = os.environ | compiled_once | timeout
        return piped(["-c", START + code], subprocess.Popen, env=environment)

    return start


def ended(process):
    """Wait for the end and what it says, and see that nothing is left."""
    _, err = waiting.ended(process)
    assert "the end of those that wait" not in err, err
    assert "terminate called" not in err
    assert "leaked" not in err  # nanobind's own report
    # Those of other tests come and go meanwhile.
    names = os.listdir("/dev/shm")
    assert [name for name in names if name.startswith(f"jaxcomm-{process.pid}-")] == []
    return err


@pytest.mark.parametrize(
    "ending",
    [
        # The one that raises there shows that, too.
        pytest.param(
            ending,
            marks=[pytest.mark.thorough] * (ending == "in the middle of a collective"),
        )
        for ending in ENDINGS
    ],
)
def test_the_process_ends_with_its_own_status(start, ending):
    code, status, message = ENDINGS[ending]
    process = start(code)
    err = ended(process)
    assert process.returncode == status, err[-3000:]
    assert message in err
    if "in the middle" not in ending and status != 1:
        # There JAX reports the collective that its end cut short.
        assert "Traceback" not in err


# faults/test_interrupt.py interrupts what waits, too.
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)],
)
def test_a_signal_ends_it_though_a_rank_waits(start, number):
    process = start(
        # Once its input ends, rank 1 comes: nobody can interrupt a callback.
        "ends = lambda: (sys.stdin.read(), rank_1_comes.set())\n"
        "threading.Thread(target=ends, daemon=True).start()\n"
        "out = begin_half_arrived()\n"
        "print('waiting', flush=True)\njax.block_until_ready(out)"
    )
    assert process.stdout.readline().strip() == "waiting"
    process.send_signal(number)
    ended(process)
    assert process.returncode != 0
