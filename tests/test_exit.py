"""C3: nobody must finalize. The process ends with its own status, at once."""

import os
import signal
import subprocess
import sys
import time

import pytest

START = r"""
import os, sys, time, signal, threading
import jax
import jax.numpy as jnp
import numpy as np
import jaxcomm

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
        others_wait.wait(60)
        time.sleep(WAIT)
    return np.float32(0)


def half_arrived(x):
    late = jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32),
                             jax.lax.axis_index("i"))
    return jaxcomm.psum(x + late, "i")


def until_waiting():
    while jaxcomm.communicators()[0].stats()["in_flight"] == 0:
        time.sleep(0.005)
    others_wait.set()

others_wait = threading.Event()
WAIT = 1.0
"""

ENDINGS = {
    "without finalize": ("", 0, ""),
    "with work in flight": ("out = [program(x) for _ in range(50)]", 0, ""),
    "after finalize": ("jaxcomm.finalize()", 0, ""),
    "after an exception": ("raise KeyError('mine')", 1, "KeyError: 'mine'"),
    "by sys.exit": ("sys.exit(7)", 7, ""),
    "in the middle of a collective": (
        "out = jitted(half_arrived)(x); until_waiting()", 0, "",
    ),
    "by an exception in the middle of a collective": (
        "out = jitted(half_arrived)(x); until_waiting(); raise KeyError('mine')",
        1,
        "KeyError: 'mine'",
    ),
    "after a failed collective": (
        "jaxcomm.finalize()\n"
        "try: jax.block_until_ready(program(x))\n"
        "except jax.errors.JaxRuntimeError as e: assert 'jaxcomm.init' in str(e)\n"
        "else: sys.exit(9)",
        0,
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_process_ends_with_its_own_status(ending):
    code, status, message = ENDINGS[ending]
    process = subprocess.Popen(
        [sys.executable, "-c", START + code],
        env=os.environ | {"JAXCOMM_TIMEOUT": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, err = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == status, err[-3000:]
    assert message in err
    if status == 0 and ending != "in the middle of a collective":
        # There JAX reports the collective that its end cut short.
        assert "Traceback" not in err
    assert "terminate called" not in err
    assert "leaked" not in err  # nanobind's own report
    # Those of other tests come and go meanwhile.
    names = os.listdir("/dev/shm")
    assert [name for name in names if name.startswith(f"jaxcomm-{process.pid}-")] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_though_a_rank_waits(number):
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            START + "WAIT = 2.0\nout = jitted(half_arrived)(x); until_waiting()\n"
            "print('waiting', flush=True)\njax.block_until_ready(out)",
        ],
        env=os.environ | {"JAXCOMM_TIMEOUT": "50"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline().strip() == "waiting"
        begin = time.monotonic()
        process.send_signal(number)
        process.communicate(timeout=40)
    finally:
        process.kill()
    assert process.returncode != 0
    # Two seconds for the callback, which nobody can interrupt, and XLA's own end.
    assert time.monotonic() - begin < 25
