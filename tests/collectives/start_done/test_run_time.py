"""Overlap, and ranks that stay away or fail between the halves."""

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
    """Call ``call(rank, *operands)`` in the program."""
    return jax.pure_callback(
        lambda rank, *given: np.float32(call(int(rank), *given) or 0),
        jax.ShapeDtypeStruct((), np.float32),
        jax.lax.axis_index("i"),
        *operands,
    )


def run(mesh, until=lambda: None, between=lambda rank, _: None, in_a_loop=False):
    """Turn an array in halves: rank 1 comes when ``until()`` returns.

    Calls ``between(rank, number)`` on both when they have computed.
    """

    def step(x):
        here = on_host(lambda rank: until() if rank == 1 else None)
        handle = jaxcomm.ppermute_start(x + here, "i", [(0, 1), (1, 0)])
        y = jnp.cumsum(x @ x.T, 1) @ x
        return handle.done(after=(y, on_host(between, y.sum())))

    def call(x):
        if in_a_loop:
            return jax.lax.fori_loop(0, 3, lambda k, x: step(x), x)
        return step(x)

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


def test_a_rank_that_stays_away_is_an_error_on_the_others(mesh):
    def failures():
        found = jaxcomm.flight_record().process.communicators
        return sum(entry.state == "failed" for each in found for entry in each.entries)

    def works():
        try:
            run(mesh)
        except jax.errors.JaxRuntimeError:
            return False  # On a machine that stood still, within so short a timeout.
        return True

    jaxcomm.init(mesh, "i", timeout=waiting.EXPIRES_SECONDS)
    before = failures()
    # Of the errors of two ranks JAX raises one.
    message = (
        r"DEADLINE_EXCEEDED: ppermute_start\(float32\[32,16\]\) over axes \('i',\): "
        rf"(rank 0 of 2 \(cpu:0\) waited {waiting.EXPIRES_SECONDS:g} s for rank 1|"
        r"the other ranks stopped waiting)"
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        run(
            mesh,
            lambda: waiting.until(lambda: failures() > before, "rank 0 gives up"),
            in_a_loop=True,
        )
    waiting.until(works, "a later program runs")
