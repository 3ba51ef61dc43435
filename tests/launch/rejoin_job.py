"""A loop whose processes are killed, started again and taken in, at chosen moments.

Usage: python -m jaxcomm.launch -n 3 --elastic --rejoin N rejoin_job.py MOMENT...

A moment is ``PROCESS-START:WHEN``: the step of a number, or what :func:`jaxcomm.grow`
is about to do, as in ``copies``, or in ``6/copies`` from step 6 on. As the others wait
for whom they lost, all steps are taken on all processes, and each prints the state of a
run without a death.
"""

import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import waiting

import jaxcomm
from jaxcomm.collectives import grow
from jaxcomm.communicator import growth
from jaxcomm.communicator.store import Store

STEPS, MOST = 10, 65521
FAILURES = jax.errors.JaxRuntimeError, ValueError, jaxcomm.CommunicatorError
me, start = jax.process_index(), int(os.environ.get("JAXCOMM_STARTS", "0"))
moments = {
    when
    for who, when in (word.split(":") for word in sys.argv[1:])
    if who == f"{me}-{start}"
}
reached = {"step": 0}


def end_at(moment):
    steps = range(reached["step"] + 1)
    if moment in moments or any(f"{step}/{moment}" in moments for step in steps):
        os.kill(os.getpid(), signal.SIGKILL)


def before(where, name, moment):
    """Have this process end at a moment, right before it calls a function."""
    call = getattr(where, name)

    def end_or_call(*arguments, **options):
        end_at(moment)
        return call(*arguments, **options)

    setattr(where, name, end_or_call)


if start:
    before(Store, "wait", "waits")
before(growth, "_gather", "gathers")
before(growth, "_enter", "enters")
before(grow, "_share", "meets")
before(grow, "_copied", "copies")
before(grow, "raise_if_failed", "agrees")


def put(mesh, value):
    array = np.asarray(value, np.int32)
    sharding = jax.NamedSharding(mesh, jax.P())
    return jax.make_array_from_callback(array.shape, sharding, lambda i: array[i])


def over(mesh, function):
    return jax.jit(
        jax.shard_map(
            function, mesh=mesh, in_specs=(jax.P(), jax.P()), out_specs=jax.P(),
            check_vma=False,
        )
    )  # fmt: skip


def advanced(total, step):
    """Count all processes that there are."""
    count = jaxcomm.psum(jnp.int32(1), "i")
    return (3 * total + step * count) % MOST


def run():
    mesh = jax.make_mesh((jax.process_count(),), ("i",))
    program, has_shrunk = None, False
    state = previous = {"total": put(mesh, 0), "step": 0, "note": None}
    while state["step"] < STEPS:
        try:
            if has_shrunk:
                least = over(mesh, lambda a, _: jaxcomm.pmin(a, "i"))
                step = int(
                    jaxcomm.raise_if_failed(
                        least(put(mesh, state["step"]), put(mesh, 0))
                    )
                )
                state = previous if step < state["step"] else state
                total = np.asarray(state["total"].addressable_data(0))
                state = state | {"total": put(mesh, total)}
            has_shrunk = False
            reached["step"] = state["step"]
            grown, state = jaxcomm.grow(mesh, "i", state, wait=waiting.HANG_SECONDS)
            if program is None or grown is not mesh:
                poison = jaxcomm.CommPolicy(on_failure="poison")
                jaxcomm.init(grown, policy=poison)
                mesh, program = grown, over(grown, advanced)
            end_at(str(state["step"]))
            total = program(state["total"], put(mesh, state["step"]))
            previous = state
            state = state | {
                "total": jaxcomm.raise_if_failed(total),
                "step": state["step"] + 1,
            }
        except FAILURES as error:
            print(f"process {me}: {error}", file=sys.stderr, flush=True)
            mesh = jaxcomm.shrink(mesh, "i", timeout=waiting.HANG_SECONDS)
            program, has_shrunk = None, True
    total = int(state["total"].addressable_data(0))
    print(f"process {me}-{start} has {total}", flush=True)


if __name__ == "__main__":
    run()
