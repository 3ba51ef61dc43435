"""Overlap, and ranks that fail between the halves."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import waiting
from models import over

import jaxcomm

pytestmark = pytest.mark.host_only(
    reason="over NCCL a stream waits: tests/ffi/fake_nccl_split_phase_test.cc"
)


@pytest.fixture
def mesh(mesh_of):
    return mesh_of((2,), ("i",))


def on_host(call, *operands):
    return jax.pure_callback(
        lambda rank, *given: np.float32(call(int(rank), *given) or 0),
        jax.ShapeDtypeStruct((), np.float32),
        jax.lax.axis_index("i"),
        *operands,
    )


def run(mesh, until=lambda: None, between=lambda rank, _: None):
    """Turn an array in halves: rank 1 comes when ``until()`` returns.

    Calls ``between(rank, number)`` on both when they have computed.
    """

    def call(x):
        here = on_host(lambda rank: until() if rank == 1 else None)
        handle = jaxcomm.ppermute_start(x + here, "i", [(0, 1), (1, 0)])
        y = jnp.cumsum(x @ x.T, 1) @ x
        return handle.done(after=(y, on_host(between, y.sum())))

    x = jnp.arange(64.0 * 16).reshape(64, 16) / 1000
    x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("i")))
    result = over(mesh, call, check_vma=False)(x)
    try:
        np.testing.assert_array_equal(result, np.roll(x, 32, 0))
    finally:
        assert all(c.stats()["in_flight"] == 0 for c in jaxcomm.communicators())


def test_computes_while_the_other_rank_is_missing(mesh):
    computed, order = threading.Event(), []

    def note(rank, _):
        order.append(rank)
        computed.set()

    jaxcomm.init(mesh, "i", timeout=waiting.HANG_SECONDS)
    # Rank 1 comes when rank 0 has computed, which does not wait for it before its done.
    run(mesh, lambda: waiting.event(computed), note)
    assert order == [0, 1]


def test_an_error_between_the_halves_is_that_error(mesh):
    refused = threading.Event()

    def fail(rank, _):
        if rank == 0:
            refused.set()
            raise RuntimeError("out of luck")

    jaxcomm.init(mesh, "i", timeout=waiting.HANG_SECONDS)
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of luck"):
        run(mesh, lambda: waiting.event(refused), fail)
    run(mesh)
