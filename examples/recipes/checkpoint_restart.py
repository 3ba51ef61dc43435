"""Checkpoint and restart: a run is killed, and goes on with half of the devices."""

import pathlib
import signal
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import jaxcomm

STEPS, WIDTH, LAYERS = 12, 32, 4
OPTIMIZER = optax.adam(1e-3)
SPLIT = jax.P(None, "data")  # parameters, and what Adam remembers of them


def layer(x, w):
    """Compute a layer; each device holds a part of its parameters."""
    w = jaxcomm.all_gather(w, "data", tiled=True)
    return x + jnp.tanh(x @ w), None


def make_step(mesh, specs):
    """Return a training step of parameters that are split over the devices."""

    def step(state, x, y):
        params, memory = state

        def mean_loss(params):
            out, _ = jax.lax.scan(jax.checkpoint(layer), x, params)
            return ((out - y) ** 2).mean() / jax.lax.axis_size("data")

        loss, gradients = jax.value_and_grad(mean_loss)(params)
        updates, memory = OPTIMIZER.update(gradients, memory, params)
        state = optax.apply_updates(params, updates), memory
        return state, jaxcomm.psum(loss, "data")

    rows = jax.P("data")
    in_specs, out_specs = (specs, rows, rows), (specs, jax.P())
    return jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    )


def init():
    """Draw the parameters, and start the optimizer."""
    shape = LAYERS, WIDTH, WIDTH
    params = jax.random.normal(jax.random.key(0), shape) / WIDTH
    return params, OPTIMIZER.init(params)


def batch_of(i):
    """Return the batch of step i, where a run that goes on finds its place."""
    x = jax.random.normal(jax.random.fold_in(jax.random.key(1), i), (32, WIDTH))
    return x, jnp.roll(x, 1, axis=1)


def train(folder, devices, on_step=lambda i: None):
    """Train from the last checkpoint, if there is one, and return the losses."""
    automatic = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((len(devices),), ("data",), automatic, devices=devices)
    shapes = jax.eval_shape(init)
    specs = jax.tree.map(lambda leaf: SPLIT if leaf.ndim else jax.P(), shapes)
    shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
    step, losses = make_step(mesh, specs), {}
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=3)
    with ocp.CheckpointManager(folder, options=options) as manager:
        first = manager.latest_step() or 0
        if first:
            # The shardings of this mesh: each device reads its part, of any number.
            like = jax.tree.map(
                lambda leaf, sharding: jax.ShapeDtypeStruct(
                    leaf.shape, leaf.dtype, sharding=sharding
                ),
                shapes,
                shardings,
            )
            state = manager.restore(first, args=ocp.args.StandardRestore(like))
        else:
            state = jax.jit(init, out_shardings=shardings)()
        for i in range(first, STEPS):
            state, loss = step(state, *batch_of(i))
            losses[i + 1] = float(loss)
            manager.save(i + 1, args=ocp.args.StandardSave(state))
            on_step(i + 1)
    return losses


def die(i):
    """Die without warning in step 8, as a machine may."""
    if i == 8:
        signal.raise_signal(signal.SIGKILL)


def main():
    """Kill a run, go on, and compare with a run that nobody kills."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        killed = subprocess.run([sys.executable, __file__, folder / "killed"])
        print(f"the first run: killed by signal {-killed.returncode} in step 8")
        devices = jax.devices()
        half = devices[: max(1, len(devices) // 2)]
        losses = train(folder / "killed", half)
        print(f"it went on with step {min(losses)}, on {len(half)} devices")
        expected = train(folder / "whole", devices)
    for i, loss in losses.items():
        assert abs(loss - expected[i]) < 1e-5, (i, loss, expected[i])  # float32
        if i in (9, 12):
            print(f"step {i}: loss {loss:.4f}, never killed {expected[i]:.4f}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # GPUs are as many as there are
    jax.config.update("jax_default_matmul_precision", "highest")  # to compare
    if sys.argv[1:]:
        train(pathlib.Path(sys.argv[1]), jax.devices(), die)
    main()
