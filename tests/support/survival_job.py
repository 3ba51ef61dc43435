"""A data-parallel job that loses processes and goes on: run by ``launch --elastic``.

Each process takes steps of gradient descent on a quadratic. In step ``LOST`` a fault
strikes one process or two, while the others wait in the step. These must raise, shrink
the mesh, redo the step, and go on with the parameters that they had, bit for bit. Each
prints lines that begin with VERDICT.

Usage: survival_job.py CASE FOLDER [numbers of the parameters]; see FAULTS.
"""

import ctypes
import os
import pathlib
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import waiting
from gpu_faults import spin, used_memory
from models import over

import jaxcomm
from jaxcomm.communicator import cache, settling
from jaxcomm.communicator.backends.nccl import communicators

LOST, STEPS = 3, 6
SOON = waiting.EXPIRES_SECONDS
# Of GPUs: from a kill to the error, and from the end of a wait to the next step's.
RAISED_SECONDS, DONE_SECONDS = 1.0, 5.0
# What communicators that are made anew may take beyond the old ones.
MORE_BYTES = 64 << 20
CASE, FOLDER, *SIZE = sys.argv[1:]
SIZE = int(SIZE[0]) if SIZE else 1 << 20
FAULT = pathlib.Path(FOLDER, "fault")
FAILURES = jax.errors.JaxRuntimeError, ValueError, jaxcomm.CommunicatorError
me, count = jax.process_index(), jax.process_count()
is_gpu = jax.default_backend() != "cpu"
verdicts = []


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def compile_for_ever():
    jax.jit(lambda x: stop() or x).lower(1.0).compile()


def write_a_checkpoint():
    fifo = FAULT.with_name(f"fifo-{me}")
    os.mkfifo(fifo)
    fifo.write_text("nobody reads")


def loop():
    while True:
        pass


# What strikes the last process, when the others are in the step.
FAULTS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "late": lambda: None,
    "stopped": stop,
    "stopped-first": stop,
    "stopped-two": stop,
    "stopped-in-shrink": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped-in-connect": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "holds-gil": lambda: ctypes.PyDLL(None).sleep(10_000),
    "loops": loop,
    "callback": waiting.forever,
    "spins": spin,
    "compiles": compile_for_ever,
    "writes": write_a_checkpoint,
}
VICTIMS = {"stopped-first": [0], "stopped-two": [count - 2, count - 1]}
victims = VICTIMS.get(CASE, [count - 1])
# It stops while it goes on with the others.
second = count - 2 if "-in-" in CASE else None
left = sorted({*range(count)} - {*victims, second})
# The others know at once that it ended; else they wait for it.
is_seen = FAULTS[CASE] is FAULTS["killed"] or second is not None


def say(text):
    print(f"process {me}: {text}", flush=True)


def verdict(name, is_good, text=""):
    verdicts.append(is_good)
    print(
        f"VERDICT {CASE} process {me}: {name}: {'ok' if is_good else 'FAILED'} {text}",
        flush=True,
    )


def all_are(word, processes):
    """Say how far this process is, and wait for others: no deadline is to end that."""
    FAULT.with_name(f"{word}-{me}").touch()
    files = [FAULT.with_name(f"{word}-{process}") for process in processes]
    waiting.until(lambda: all(file.exists() for file in files), word)


def hang(batch):
    """Strike from within the program, in a host callback."""
    if me in victims and FAULT.exists():
        FAULTS[CASE]()
    return batch


def step_over(mesh):
    def local(params, batch):
        if CASE == "callback":
            batch = jax.pure_callback(hang, batch, batch)
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


def expected_after(taking_part):
    """The parameters after steps of so many processes each, by float32 on the host."""
    value = np.float32(0)
    for step, some in enumerate(taking_part):
        grads = [np.float32(2) * (value - np.float32(p + step)) for p in some]
        mean = np.float32(sum(grads, np.float32(0)) / np.float32(len(some)))
        value = np.float32(value - np.float32(0.25) * mean)
    return value


def main():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), auto)
    jaxcomm.init(
        mesh,
        policy=jaxcomm.CommPolicy(on_failure="poison"),
        timeout=None if is_seen else SOON,
    )
    params = put(mesh, jax.P(), np.zeros(SIZE, np.float32))
    step_of = step_over(mesh).lower(params, batch_of(mesh, 0)).compile()
    all_are("compiled", range(count))
    for step in range(LOST):
        params = jaxcomm.raise_if_failed(step_of(params, batch_of(mesh, step)))
    before, memory = bits(params), used_memory()
    if me in victims:
        strike(mesh, step_of, params)
        return
    batch = batch_of(mesh, LOST)
    FAULT.with_name(f"in-step-{me}").touch()
    begin = waiting.time_of_day()
    try:
        jaxcomm.raise_if_failed(step_of(params, batch))
    except FAILURES as error:
        raised = waiting.time_of_day()
        say(f"raised {type(error).__name__}: {' '.join(str(error).split())[:400]}")
        # A late rank: from the end of the wait of whoever waited longest.
        struck = float(FAULT.read_text()) if is_seen else begin + SOON
        seconds = raised - struck
        # Other machines may be as slow as they like.
        most = RAISED_SECONDS if CASE in ("killed", "late") else DONE_SECONDS
        verdict("raised in time", seconds < most or not is_gpu, f"({seconds:.3f} s)")
        names_it = not is_seen or any(f"process {p}" in str(error) for p in victims)
        verdict("names the cause", names_it)
    else:
        verdict("raised", False)
    if me == second:
        if CASE == "stopped-in-shrink":
            cache.move = lambda *_: stop()
        communicators._new_world = lambda *_: stop()
    all_are("done-with-the-step", [*left, me])
    begin = waiting.time_of_day()
    mesh = jaxcomm.shrink(mesh, "data", timeout=SOON)
    seconds = waiting.time_of_day() - begin
    say(f"shrunk in {seconds:.3f} s to {mesh.devices.size}")
    rows = [device.process_index for device in mesh.devices.flat]
    verdict("who is left", rows == left, f"({rows})")
    FAULT.with_name(f"given-up-{me}").touch()
    params = on(mesh, params)
    verdict("the same parameters", bits(params) == before)
    step_of = step_over(mesh).lower(params, batch_of(mesh, LOST)).compile()
    all_are("compiled-again", left)
    for step in range(LOST, STEPS):
        params = jaxcomm.raise_if_failed(step_of(params, batch_of(mesh, step)))
        if step == LOST:
            now = waiting.time_of_day()
            say(f"the next step is done {now - raised:.3f} s after the error")
            # One that stops later is waited for once more.
            is_soon = now - raised < DONE_SECONDS or not is_gpu or second is not None
            verdict("goes on in time", is_soon, f"({now - raised:.3f} s)")
    found = np.asarray(params.addressable_shards[0].data)
    wanted = expected_after([range(count)] * LOST + [left] * (STEPS - LOST))
    verdict("right after more steps", bool(np.all(found == wanted)), f"({found[0]})")
    after = used_memory()
    text = f"({memory >> 20} MiB before, {after >> 20} after)"
    verdict("memory is given back", after <= memory + MORE_BYTES, text)
    say("DONE")


def strike(mesh, step_of, params):
    """Be struck while the others wait in the step."""
    batch = batch_of(mesh, LOST)
    others = count - len(victims)
    waiting.until(lambda: len([*FAULT.parent.glob("in-step-*")]) == others)
    FAULT.write_text(repr(waiting.time_of_day()))
    if CASE == "late":
        # Come once the others have given this process up.
        waiting.until(lambda: len([*FAULT.parent.glob("given-up-*")]) == others)
    elif CASE != "callback":
        if CASE == "holds-gil":
            # Woken by the launcher's signal, it comes to the others before a thread of
            # its own sees that they have given it up.
            settling._end_if_late = lambda *_: None
        FAULTS[CASE]()
    try:
        params = jaxcomm.raise_if_failed(step_of(params, batch))
    except FAILURES as error:
        say(f"raised {type(error).__name__}: {' '.join(str(error).split())[:400]}")
        verdict("its step raised", True)
    else:
        # The launcher's signal interrupts a C function, too. Who comes back by that may
        # still end the step: the others stop NCCL once this process knows, or is gone.
        found = np.asarray(params.addressable_shards[0].data)
        wanted = expected_after([range(count)] * (LOST + 1))
        is_right = CASE != "late" and bool(np.all(found == wanted))
        verdict("its step raised or is right", is_right, f"({found[0]})")
    try:
        jaxcomm.shrink(mesh, "data", timeout=SOON)
    except jaxcomm.CommunicatorError as error:
        verdict("is told that it was given up", "gave it up" in str(error), str(error))
    else:
        verdict("is told that it was given up", False)


main()
sys.exit(0 if all(verdicts) else 1)
