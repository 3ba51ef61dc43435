"""A data-parallel job that loses a process and goes on: run by ``launch --elastic``.

Each process takes steps of gradient descent on a quadratic. In step ``LOST`` the last
process is killed, or is late until the others have given it up. The others must raise
within a second, shrink the mesh, redo the step, and go on with the parameters that they
had, bit for bit. Each prints lines that begin with VERDICT.

Usage: survival_job.py (killed | late) FOLDER [numbers of the parameters]
"""

import os
import pathlib
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import waiting
from models import over

import jaxcomm

LOST, STEPS = 3, 6
SOON = waiting.EXPIRES_SECONDS
WITHIN_SECONDS = 1.0
CASE, FOLDER, *SIZE = sys.argv[1:]
SIZE = int(SIZE[0]) if SIZE else 1 << 20
FAULT = pathlib.Path(FOLDER, "fault")
FAILURES = jax.errors.JaxRuntimeError, ValueError, jaxcomm.CommunicatorError
me = jax.process_index()
verdicts = []


def say(text):
    print(f"process {me}: {text}", flush=True)


def verdict(name, is_good, text=""):
    verdicts.append(is_good)
    print(
        f"VERDICT {CASE} process {me}: {name}: {'ok' if is_good else 'FAILED'} {text}",
        flush=True,
    )


def step_over(mesh):
    def local(params, batch):
        grads = jax.grad(lambda p: jnp.sum((p - batch[0]) ** 2))(params)
        return params - 0.25 * jaxcomm.pmean(grads, "data")

    return over(mesh, local, (jax.P(), jax.P("data")), jax.P(), check_vma=False)


def put(mesh, spec, x):
    sharding = jax.NamedSharding(mesh, spec)
    return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)


def batch_of(mesh, step):
    """Row k of a batch is of the process that had k in the beginning."""
    rows = [d.process_index + step for d in mesh.devices.flat]
    return put(mesh, jax.P("data"), np.array(rows, np.float32))


def on(mesh, params):
    """The same buffers, replicated over a mesh."""
    parts = [shard.data for shard in params.addressable_shards]
    sharding = jax.NamedSharding(mesh, jax.P())
    return jax.make_array_from_single_device_arrays(params.shape, sharding, parts)


def bits(params):
    return np.asarray(params.addressable_shards[0].data).tobytes()


def expected_after(counts):
    """The parameters after steps with so many processes, by float32 on the host."""
    value = np.float32(0)
    for step, count in enumerate(counts):
        grads = [np.float32(2) * (value - np.float32(p + step)) for p in range(count)]
        mean = np.float32(sum(grads, np.float32(0)) / np.float32(count))
        value = np.float32(value - np.float32(0.25) * mean)
    return value


def main():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), auto)
    count = jax.process_count()
    is_victim = me == count - 1
    jaxcomm.init(
        mesh,
        policy=jaxcomm.CommPolicy(on_failure="poison"),
        timeout=SOON if CASE == "late" else None,
    )
    step_of = step_over(mesh)
    params = put(mesh, jax.P(), np.zeros(SIZE, np.float32))
    counts = []
    for step in range(LOST):
        params = jaxcomm.check(step_of(params, batch_of(mesh, step)))
        counts.append(count)
    before = bits(params)
    if is_victim:
        batch = batch_of(mesh, LOST)
        # The others are to wait inside of the step.
        waiting.until(lambda: len(list(FAULT.parent.glob("in-step-*"))) == count - 1)
        FAULT.write_text(repr(waiting.time_of_day()))
        if CASE == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        late_victim(mesh, step_of, params, batch)
        return
    FAULT.with_name(f"in-step-{me}").touch()
    begin = waiting.time_of_day()
    try:
        jaxcomm.check(step_of(params, batch_of(mesh, LOST)))
    except FAILURES as error:
        raised = waiting.time_of_day()
        say(f"raised {type(error).__name__}: {' '.join(str(error).split())[:400]}")
        # A late rank: from the end of the wait of whoever waited longest.
        struck = begin + SOON if CASE == "late" else float(FAULT.read_text())
        seconds = raised - struck
        # Other machines may be as slow as they like.
        is_soon = seconds < WITHIN_SECONDS or jax.default_backend() == "cpu"
        verdict("raised in time", is_soon, f"({seconds:.3f} s)")
        names_it = CASE == "late" or f"process {count - 1}" in str(error)
        verdict("names the cause", names_it)
    else:
        verdict("raised", False)
    begin = waiting.time_of_day()
    mesh = jaxcomm.shrink(mesh, "data", timeout=SOON)
    seconds = waiting.time_of_day() - begin
    say(f"shrunk in {seconds:.3f} s to {mesh.devices.size}")
    verdict("one row less", mesh.devices.size == count - 1)
    FAULT.with_name(f"given-up-{me}").touch()
    params = on(mesh, params)
    verdict("the same parameters", bits(params) == before)
    step_of = step_over(mesh)
    for step in range(LOST, STEPS):
        params = jaxcomm.check(step_of(params, batch_of(mesh, step)))
        if step == LOST:
            seconds = waiting.time_of_day() - raised
            say(f"the next step is done {seconds:.3f} s after the error")
        counts.append(count - 1)
    found = np.asarray(params.addressable_shards[0].data)
    wanted = expected_after(counts)
    verdict("right after more steps", bool(np.all(found == wanted)), f"({found[0]})")


def late_victim(mesh, step_of, params, batch):
    """Come once the others have given this process up."""
    others = jax.process_count() - 1
    waiting.until(lambda: len(list(FAULT.parent.glob("given-up-*"))) == others)
    try:
        jaxcomm.check(step_of(params, batch))
    except FAILURES as error:
        say(f"raised {type(error).__name__}: {' '.join(str(error).split())[:400]}")
        verdict("its step raised", True)
    else:
        verdict("its step raised", False)
    try:
        jaxcomm.shrink(mesh, "data", timeout=SOON)
    except jaxcomm.CommunicatorError as error:
        verdict("is told that it was given up", "gave it up" in str(error), str(error))
    else:
        verdict("is told that it was given up", False)


main()
sys.exit(0 if all(verdicts) else 1)
