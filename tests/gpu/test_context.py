"""What the driver takes for the calling thread's GPU is nobody's but the caller's."""

import ctypes
import os

import jax
import jax.numpy as jnp
import pytest

import jaxcomm

pytestmark = pytest.mark.gpu


@pytest.fixture
def current(ring):
    driver = ctypes.CDLL(os.environ.get("JAXCOMM_NCCL_LIBRARY", "libcuda.so.1"))

    def of_this_thread():
        context = ctypes.c_void_p()
        assert driver.cuCtxGetCurrent(ctypes.byref(context)) == 0
        return context.value

    return of_this_thread


def test_the_current_context_is_left_as_found(ring, current):
    before = current()
    jaxcomm.init(ring, "i")
    assert current() == before
    spec = jax.P("i")
    program = jax.jit(
        jax.shard_map(
            lambda x: jaxcomm.ppermute(x, "i", [(0, 1)]) + jaxcomm.psum(x, "i"),
            mesh=ring, in_specs=spec, out_specs=spec,
        )
    )  # fmt: skip
    x = jax.device_put(jnp.arange(float(ring.size)), jax.NamedSharding(ring, spec))
    program = program.lower(x).compile()
    # XLA sets it in device_put, and where it compiles.
    before = current()
    jax.block_until_ready(program(x))
    (member,) = jaxcomm.communicators()
    assert member.stats()["bytes"] > 0
    assert current() == before
    member.close()
    assert current() == before
