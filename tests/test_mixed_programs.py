"""Our collectives beside XLA's own, and beside callbacks, in one program.

In a process of its own: XLA ends the process if the two block each other.
"""

import os
import sys

import forked
import pytest
import waiting

PROGRAM = r"""
import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm

mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
both = ("a", "b")
x = jnp.arange(24.0).reshape(8, 3)
ring = [(0, 1), (1, 2), (2, 3), (3, 0)]


def run(call, *more):
    # What `more` holds is the same on all devices, and so is the result.
    spec = jax.P(both)
    program = jax.jit(jax.shard_map(
        call, mesh=mesh, in_specs=(*(jax.P() for _ in more), spec),
        out_specs=jax.P() if more else spec))
    for _ in range(10):
        out = jax.block_until_ready(program(*more, x))
    return out


def independent(x):
    return [lib.ppermute(lib.psum(x + k, "b"), "a", [(0, 1), (1, 0)])
            for k in range(6) for lib in (jaxcomm, jax.lax)]


found = run(independent)
for ours, lax in zip(found[::2], found[1::2]):
    np.testing.assert_array_equal(ours, lax)
print("independent", flush=True)


def dependent(x, libs=(jaxcomm, jax.lax)):
    for lib in libs * 3:
        x = lib.pmean(lib.ppermute(x, "b", ring), "a") + x
    return x


np.testing.assert_array_equal(
    run(dependent), run(lambda x: dependent(x, (jax.lax, jax.lax))))
print("dependent", flush=True)


def callbacks(x):
    for k in range(6):
        x = jaxcomm.ring_shift(x, both)
        scalar = jax.ShapeDtypeStruct((), np.float32)
        x = x + jax.pure_callback(lambda: np.float32(1), scalar)
    return x, jaxcomm.pmax(x, "a")


found = run(callbacks)
np.testing.assert_array_equal(found[0], np.roll(np.asarray(x), 6, 0) + 6)
print("callbacks", flush=True)


def loss(w, x):
    w = jax.lax.pcast(w, both, to="varying")
    return jaxcomm.pmean((jaxcomm.ring_shift(x, "b") * w).sum(), both)


found = run(jax.grad(loss), jnp.arange(3.0))
np.testing.assert_allclose(found, x.mean(0), rtol=1e-6)
print("gradients summed by XLA", flush=True)
"""


@pytest.mark.multiprocess
def test_both_kinds_of_collectives_run_in_one_program():
    ran = forked.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=waiting.HANG_SECONDS,
    )
    assert ran.stdout.split("\n") == [
        "independent", "dependent", "callbacks", "gradients summed by XLA", "",
    ], (ran.returncode, ran.stderr[-1500:])  # fmt: skip
