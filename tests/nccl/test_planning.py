"""The plan names the engine, the communicators and the memory of a real run."""

import jax
import jax.numpy as jnp
import pytest
from models import over

import jaxcomm
from jaxcomm import _ffi

MIB = 1 << 20


@pytest.mark.parametrize(
    ("name", "collective", "size"),
    [
        ("psum", "all_reduce", MIB // 4),
        ("psum", "all_reduce", MIB // 4 + 1),
        ("pmax", "all_reduce", 64),
        ("ring_shift", "permute", 64),
        ("ring_shift", "permute", 8 * MIB),
        ("all_gather", "all_gather", 8 * MIB),
        ("all_gather", "all_gather", 8 * MIB - 1),
    ],
)
def test_the_engine_is_that_of_the_communicator(
    with_kernels, make_mesh, name, collective, size
):
    mesh = make_mesh(i=2)
    (one,) = jaxcomm.init(mesh, "i")
    x = jax.ShapeDtypeStruct((size,), "float32")
    made = jaxcomm.plan(
        mesh,
        lambda x: getattr(jaxcomm, name)(x, "i"),
        x,
        machine="gpu",
        backend="nccl",
    )
    (row,) = made.calls
    result = [2, size] if collective == "all_gather" else [size]
    found = _ffi.explain_engine(
        key=one.key,
        collective=collective,
        reduce="max" if name == "pmax" else "sum",
        params={"permute": [1, 0], "all_gather": [1]}.get(collective, []),
        operands=[("float32", [size])],
        results=[("float32", result)],
    )
    assert (row.cost.carrier, row.cost.reason) == found


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
    assert [(each.key.axes, each.key.backend) for each in made.communicators] == [
        (each.axes, each.backend) for each in live
    ]
    for planned, row in zip(made.communicators, jaxcomm.memory_report(), strict=True):
        # The stand-in takes no buffers of NCCL's, but our kernels' inboxes are real.
        inboxes = 8 * _ffi.one_shot_bytes(planned.size)
        assert row.device_bytes >= inboxes
        assert planned.shares == row.shared
        assert 8 * planned.pinned_bytes.value == row.pinned_bytes
        assert planned.host_bytes.value == row.host_bytes
