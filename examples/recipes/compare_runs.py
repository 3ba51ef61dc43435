"""Find the first collective at which two runs differ, by checksums."""

import os
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm

MICROBATCHES = 16


def make_step(mesh):
    """Return a step whose bits do not depend on the number of devices."""

    def loss_of(w, x):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    def step(w, xs):
        w_here = jaxcomm.pcast(w, "data", to="varying")
        gradients = jax.lax.map(lambda x: jax.grad(loss_of)(w_here, x), xs)
        total = jaxcomm.local_sum(gradients)
        return w - 0.01 * jaxcomm.psum(total, "data", reproducible=True)

    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P()}
    return jax.jit(jax.shard_map(step, mesh=mesh, **specs))


def train(folder, share, wrong_step):
    """Train on a share of the devices; in one step, the last one has a wrong bit."""
    devices = jax.devices()[: jax.device_count() // share]
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=auto, devices=devices)
    step, w = make_step(mesh), np.ones((32, 16), np.float32) / 32
    for number in range(6):
        shape = MICROBATCHES, 8, 32
        xs = np.random.default_rng(number).standard_normal(shape, np.float32)
        if number == wrong_step:
            xs.view(np.int32)[-1, -1, -1] ^= 1 << 20
        w = step(w, xs)
        jaxcomm.checksums.save(folder, number)


def main():
    """Run four times, and compare."""
    runs = {"first": (1, -1), "again": (1, -1), "wrong": (1, 3), "half": (2, -1)}
    with tempfile.TemporaryDirectory() as folder:
        for run, (share, wrong_step) in runs.items():
            path = os.path.join(folder, run)
            subprocess.run(
                [sys.executable, __file__, path, str(share), str(wrong_step)],
                env=os.environ | {"JAXCOMM_CHECKSUMS": "1"},
                check=True,
            )
        for run in ("again", "half", "wrong"):
            paths = (os.path.join(folder, each) for each in ("first", run))
            found = jaxcomm.checksums.compare(*paths)
            print(f"first and {run}: {found}")
            assert (found.first is not None) == (run == "wrong")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        jax.config.update("jax_num_cpu_devices", 8)
        train(sys.argv[1], *map(int, sys.argv[2:]))
