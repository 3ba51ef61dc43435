"""A process is killed and started again: the others wait for it, and take it in."""

import os
import re
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm

AXES = "data", "context"
STEPS, KILLED = 20, 7  # the step before which process 1 is killed
SECONDS = 60.0  # that the others wait for it
FAILURES = jax.errors.JaxRuntimeError, ValueError, jaxcomm.CommunicatorError


def make_step(mesh):
    """Return a step of gradient descent. It donates nothing: it may be taken again."""

    def loss_of(params, x):
        params = jaxcomm.pcast(params, AXES, to="varying")
        return ((jnp.tanh(x @ params) - jnp.sin(x)) ** 2).mean() / mesh.size

    def step(params, x):
        loss, gradients = jax.value_and_grad(loss_of)(params, x)
        return params - 0.5 * gradients, jaxcomm.psum(loss, AXES)

    specs = {"in_specs": (jax.P(), jax.P(*AXES)), "out_specs": jax.P()}
    return jax.jit(jax.shard_map(step, mesh=mesh, **specs))


def smallest(mesh, number):
    """Return the smallest number that a process of the mesh has."""
    least = jax.shard_map(
        lambda x: jaxcomm.pmin(x, AXES), mesh=mesh, in_specs=jax.P(), out_specs=jax.P()
    )
    return int(jaxcomm.raise_if_failed(jax.jit(least)(put(mesh, np.int32(number)))))


def put(mesh, array, *spec):
    """Put an array that every process has on a mesh, without a collective of XLA."""
    sharding = jax.NamedSharding(mesh, jax.P(*spec))
    return jax.make_array_from_callback(array.shape, sharding, lambda i: array[i])


def start(mesh):
    """Make the communicators and the step of a mesh."""
    poison = jaxcomm.CommPolicy(on_failure="poison")
    jaxcomm.init(mesh, "data", AXES, policy=poison)
    return make_step(mesh)


def train(mesh):
    """Train; what a lost process missed, it gets from one that went on."""
    step, must_agree = None, False
    params = put(mesh, np.zeros((16, 16), np.float32))
    state = before = {"params": params, "done": 0, "loss": 0.0}
    while state["done"] < STEPS:
        try:
            if must_agree and smallest(mesh, state["done"]) < state["done"]:
                state = before  # others have not taken this step
            if must_agree:
                own = np.asarray(state["params"].addressable_data(0))
                state = {**state, "params": put(mesh, own)}
            must_agree = False
            grown, state = jaxcomm.grow(mesh, "data", state, wait=SECONDS)
            if step is None or grown is not mesh:
                mesh, step = grown, start(grown)
            done = state["done"]
            if KILLER and done == KILLED and jax.process_index() == 1 and not AGAIN:
                os.kill(os.getpid(), signal.SIGKILL)
            batch = np.random.default_rng(done).random((12, 8, 16), np.float32)
            params, loss = step(state["params"], put(mesh, batch, *AXES))
            params, loss = jaxcomm.raise_if_failed((params, loss))
            before = state
            state = {"params": params, "done": done + 1, "loss": float(loss)}
        except FAILURES:
            mesh = jaxcomm.shrink(mesh, "data", timeout=SECONDS)
            step, must_agree = None, True
    again = ", started again" if AGAIN else ""
    # In one piece, beside what others print.
    text = f"process {jax.process_index()}{again}: last loss {state['loss'].hex()}\n"
    print(text, end="", flush=True)


def run(*words):
    """Run this file as three processes of two devices each; return what they print."""
    command = [sys.executable, "-m", "jaxcomm.launch", "-n3", "--elastic"]
    command += ["--rejoin=1", "--no-prefix", "--devices-per-process=2", __file__]
    return subprocess.run(
        [*command, *words], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def main():
    """Train with a killed process and without: the losses are the same bits."""
    disturbed, undisturbed = run("kill"), run()
    for line in sorted(disturbed.splitlines()):
        print(re.sub("loss .*", "loss", line))
    losses = set(re.findall("loss (.*)", disturbed + undisturbed))
    if len(losses) != 1:
        raise AssertionError(f"the losses differ: {losses}")
    print(f"{float.fromhex(*losses):.4f} for all, and without a kill")


if __name__ == "__main__":
    KILLER = "kill" in sys.argv
    AGAIN = os.environ.get("JAXCOMM_STARTS", "0") != "0"
    auto = (jax.sharding.AxisType.Auto,) * 2
    train(jax.make_mesh((jax.process_count(), 2), AXES, auto))
