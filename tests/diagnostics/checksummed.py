"""Steps whose collectives are recorded, for test_checksums.py.

Takes a folder, a backend, the number of devices, and where a bit is wrong: the step and
the rank, or -1.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm


def make_step(mesh, backend):
    """Return a step with a loop, a split-phase collective, and gradients."""
    options = {"backend": backend}

    def step(w, x, wrong):
        def turn(carry, number):
            sent = carry * jnp.where(number == 1, 1 + wrong, 1)
            handle = jaxcomm.ring_shift_start(sent, "i", **options)
            total = jaxcomm.psum(carry, "i", reproducible=True, **options)
            return 0.5 * handle.done(after=total) + 0.1 * total, None

        def loss(w):
            w = jaxcomm.pcast(w, "i", to="varying")
            y, _ = jax.lax.scan(turn, x * w, jnp.arange(3))
            return jnp.sum(y**2)

        with jaxcomm.using(reproducible=True, **options):
            gradient = jax.grad(loss)(w)
        every = jnp.tile(gradient, mesh.size)
        parts = jaxcomm.psum_scatter(every, "i", tiled=True, **options)
        return w - 0.01 * gradient, parts

    split = jax.P("i")
    specs = {"in_specs": (jax.P(), split, split), "out_specs": (jax.P(), split)}
    return jax.jit(jax.shard_map(step, mesh=mesh, **specs))


def main(folder, backend, count, wrong_step, wrong_rank):
    """Take three steps and save the checksums of each."""
    devices = jax.devices()[:count]
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((count,), ("i",), axis_types=auto, devices=devices)
    step = make_step(mesh, backend)

    def put(x, *spec):
        sharding = jax.NamedSharding(mesh, jax.P(*spec))
        return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])

    w = put(np.linspace(0.5, 1, 6, dtype=np.float32))
    x = put(np.tile(np.arange(6, dtype=np.float32), count), "i")
    for number in range(3):
        wrong = np.zeros(count * 6, np.float32)
        if number == wrong_step:
            wrong[6 * wrong_rank + 1] = 2.0**-23  # the last bit
        w, _ = step(w, x, put(wrong, "i"))
        jaxcomm.checksums.save(folder, number)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
