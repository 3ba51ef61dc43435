"""Our collectives beside XLA's own, and beside callbacks, in one program.

In a process of its own: where the two block each other XLA ends the process.
"""

import os
import subprocess
import sys

import pytest

PREAMBLE = r"""
import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm

mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
both = ("a", "b")
x = jnp.arange(24.0).reshape(8, 3)
ring = [(0, 1), (1, 2), (2, 3), (3, 0)]


def run(call):
    spec = jax.P(both)
    program = jax.jit(
        jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec))
    for _ in range(10):
        out = jax.block_until_ready(program(x))
    return out
"""

PROGRAMS = {
    "independent": r"""
def both_libraries(x):
    out = []
    for k in range(10):
        y = x + k
        for lib in (jaxcomm, jax.lax):
            out.append((lib.psum(y, "b"), lib.all_gather(y, "b"),
                        lib.ppermute(y, "b", ring)))
    return out

found = run(both_libraries)
for ours, lax in zip(found[::2], found[1::2]):
    jax.tree.map(np.testing.assert_array_equal, ours, lax)
""",
    "dependent": r"""
def alternating(libs):
    def call(x):
        for k in range(10):
            lib = libs[k % 2]
            x = lib.pmean(lib.ppermute(x, "b", ring), "a") + x
        return x
    return call

np.testing.assert_array_equal(run(alternating([jaxcomm, jax.lax])),
                              run(alternating([jax.lax, jax.lax])))
""",
    "two backends": r"""
def call(x):
    return [jaxcomm.psum(x * k, axes, backend=backend)
            for k in range(6) for axes in ("a", both) for backend in ("host", "xla")]

found = run(call)
for ours, lax in zip(found[::2], found[1::2]):
    np.testing.assert_array_equal(ours, lax)
""",
    "callbacks": r"""
def call(x):
    for k in range(6):
        x = jaxcomm.ring_shift(x, both)
        scalar = jax.ShapeDtypeStruct((), np.float32)
        x = x + jax.pure_callback(lambda: np.float32(1), scalar)
    return x, jaxcomm.pmax(x, "a")

found = run(call)
np.testing.assert_array_equal(found[0], np.roll(np.asarray(x), 6, 0) + 6)
""",
    "gradients summed by XLA": r"""
w = jnp.arange(3.0)

def loss(w, x):
    w = jax.lax.pcast(w, both, to="varying")
    return jaxcomm.pmean((jaxcomm.ring_shift(x, "b") * w).sum(), both)

program = jax.jit(jax.shard_map(jax.grad(loss), mesh=mesh,
                                in_specs=(jax.P(), jax.P(both)), out_specs=jax.P()))
for _ in range(10):
    found = jax.block_until_ready(program(w, x))
np.testing.assert_allclose(found, x.mean(0), rtol=1e-6)
""",
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_both_kinds_of_collectives_run_in_one_program(case):
    ran = subprocess.run(
        [sys.executable, "-c", PREAMBLE + PROGRAMS[case] + "\nprint('ALL RIGHT')"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "ALL RIGHT" in ran.stdout, (ran.returncode, ran.stderr[-1500:])
