"""The plan names the communicators and the memory of a real run."""

import jax
import jax.numpy as jnp
from models import over

import jaxcomm
from jaxcomm import _ffi


def test_communicators_and_small_sums_memory_are_those_of_a_run(
    with_kernels, make_mesh
):
    mesh = make_mesh(data=2, context=4)
    program = over(
        mesh,
        lambda x: jaxcomm.psum(jaxcomm.psum(x, "data"), "context"),
        jax.P("data", "context"),
        jax.P(),
    )
    x = jnp.ones((8, 16))
    made = jaxcomm.plan(mesh, program, x, machine="gpu", backend="nccl")
    jax.block_until_ready(program(x))
    live = jaxcomm.communicators()
    assert [(each.axes, each.backend) for each in made.communicators] == [
        (each.axes, each.backend) for each in live
    ]
    for planned, row in zip(made.communicators, jaxcomm.memory_report(), strict=True):
        # The stand-in takes no buffers of NCCL's, but our kernels' inboxes are real.
        inboxes = 8 * _ffi.one_shot_bytes(planned.size)
        assert row.device_bytes >= inboxes
        assert planned.shares == row.shared
