"""Elastic training: one is killed, another hangs, and the others go on in place."""

import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm

AXES = "data", "context"
# By step and process, for show.
FAULTS = {(12, 0): signal.SIGKILL, (22, 2): signal.SIGSTOP}
SECONDS = 15.0  # that a rank waits for one that hangs; 300 if left out
MOST_LATE = 3  # failures in a row by which nobody is lost


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


def train(mesh):
    """Train on fewer and fewer rows of the mesh, if processes end."""
    poison = jaxcomm.CommPolicy(on_failure="poison")
    jaxcomm.init(mesh, "data", AXES, policy=poison, timeout=SECONDS)
    step, done, has_shrunk, late = make_step(mesh), 0, False, 0
    params = before = put(mesh, np.zeros((16, 16), np.float32))
    while done < 30:
        try:
            if has_shrunk and (taken := smallest(mesh, done)) < done:
                params, done = before, taken  # others have not taken this step
            if has_shrunk:
                own, has_shrunk = np.asarray(params.addressable_data(0)), False
                params = put(mesh, own)
            if fault := FAULTS.get((done, jax.process_index())):
                os.kill(os.getpid(), fault)
            shape = 4 * mesh.shape["data"], 8, 16  # four sequences a row
            batch = np.random.default_rng(done).random(shape, np.float32)
            new, loss = jaxcomm.raise_if_failed(step(params, put(mesh, batch, *AXES)))
            before, params, done, late = params, new, done + 1, 0
            if done % 10 == 0 and jax.process_index() == 1:
                print(f"step {done}: loss {loss:.4f}, {mesh.shape['data']} rows")
        except (jax.errors.JaxRuntimeError, ValueError, jaxcomm.CommunicatorError):
            smaller = jaxcomm.shrink(mesh, "data", timeout=SECONDS)
            if smaller is mesh and (late := late + 1) > MOST_LATE:
                raise  # again and again nobody was lost: it is another error
            if smaller is not mesh:
                mesh, step = smaller, make_step(smaller)
            has_shrunk = True


def main():
    """Run this file as four processes of two devices each."""
    command = [sys.executable, "-m", "jaxcomm.launch", "-n4", "--elastic"]
    subprocess.run([*command, "--devices-per-process=2", __file__], check=True)


if __name__ == "__main__":
    auto = (jax.sharding.AxisType.Auto,) * 2
    train(jax.make_mesh((jax.process_count(), 2), AXES, auto))
