"""What one operation asks of NCCL and CUDA, and nothing beside it."""

import collections
import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import waiting
from models import over

import jaxcomm


def test_the_current_context_is_left_as_found(stand_in, make_mesh):
    """PyTorch or CuPy in the same thread go on with the device they had chosen."""
    stand_in.cuInit(0)
    third, first, found = (ctypes.c_void_p() for _ in range(3))
    stand_in.cuDevicePrimaryCtxRetain(ctypes.byref(third), 3)
    stand_in.cuDevicePrimaryCtxRetain(ctypes.byref(first), 0)
    mesh = make_mesh(i=2)
    for mine in (third, first, None):
        if mine is not None:
            stand_in.cuCtxPushCurrent_v2(mine)
        # NCCL leaves the device of the rank at which a group failed.
        stand_in.fail("ncclGroupEnd", 2)
        with pytest.raises(RuntimeError, match="ncclCommInitRankConfig"):
            jaxcomm.init(mesh)
        jaxcomm.init(mesh)
        x = jnp.arange(2.0)
        program = over(mesh, lambda x: jaxcomm.psum(x, "i"), out=jax.P())
        jax.block_until_ready(program(x))
        jaxcomm.finalize()
        stand_in.cuCtxGetCurrent(ctypes.byref(found))
        assert found.value == (mine.value if mine is not None else None)
        if mine is not None:
            stand_in.cuCtxPopCurrent_v2(ctypes.byref(found))
    for device in (3, 0):
        stand_in.cuDevicePrimaryCtxRelease_v2(device)

    def threads(name):
        calls = stand_in.trace(f"cuCtx{name}Current_v2")
        return collections.Counter(call["thread"] for call in calls)

    # The thread that watches over communicators may be between the two. What CUDA's
    # runtime made current is popped, too.
    waiting.until(lambda: not threads("Push") - threads("Pop"))


def test_lanes_have_streams_of_their_own(stand_in, make_mesh):
    mesh = make_mesh(i=2)
    jaxcomm.init(mesh, lanes=("default", "other"))

    def both(x):
        return jaxcomm.psum(x, "i"), jaxcomm.psum(x * 2, "i", lane="other")

    stand_in.clear()
    program = over(mesh, both, out=(jax.P(), jax.P()))
    one, two = jax.block_until_ready(program(jnp.arange(2.0)))  # On both devices.
    np.testing.assert_array_equal((one[0], two[0]), (1, 2))
    calls = stand_in.trace("ncclAllReduce")
    assert len({(call["comm"], call["stream"]) for call in calls}) == 4
