"""Small sums by this package's own kernels. The stand-in runs them on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import over

import jaxcomm

INBOX = 8 * 2**20  # bytes of each device


def calls():
    return sum(one.stats()["one_shot_calls"] for one in jaxcomm.communicators())


@pytest.mark.parametrize("size", [2, 8])
def test_a_small_sum_is_one_launch_without_nccl(with_kernels, make_mesh, size):
    """Values of each type: tests/gpu/test_one_shot.py, over the stand-in too."""
    x = jnp.arange(12.0 * size).reshape(4 * size, 3)
    program = over(make_mesh(i=size), lambda x: jaxcomm.psum(x, "i"), out=jax.P())
    found = jax.block_until_ready(program(x))  # On every device.
    np.testing.assert_array_equal(found, x.reshape(size, 4, 3).sum(0))
    assert calls() == 1
    assert len(with_kernels.trace("cuLaunchKernel")) == size
    # Its kernel tells how far it is.
    assert not with_kernels.trace("cuEventRecord")
    # The communicator's first use is no call of the program.
    assert not [c for c in with_kernels.trace("ncclAllReduce") if c["count"] > 1]


def test_memory_and_the_report_of_it(with_kernels, make_mesh):
    """An inbox of each device, which stays while NCCL's memory is given back."""
    mesh = make_mesh(i=2)
    policy = jaxcomm.CommPolicy(share=False)
    with_kernels.clear()
    (one,) = jaxcomm.init(mesh, "i", policy=policy)
    allocated = [call["count"] for call in with_kernels.trace("cuMemAlloc_v2")]
    assert allocated.count(INBOX) == 2
    held = one.stats()["device_bytes"]
    assert held > 2 * INBOX
    assert one.stats()["one_shot"] == "yes"
    program = over(mesh, lambda x: jaxcomm.psum(x, "i"), out=jax.P())
    x = jnp.arange(24.0).reshape(8, 3)
    jax.block_until_ready(program(x))
    one.suspend()
    assert 2 * INBOX <= one.stats()["device_bytes"] < held
    with pytest.raises(Exception, match="suspended"):
        jax.block_until_ready(program(x))
    one.resume()
    np.testing.assert_allclose(program(x), x[:4] + x[4:])
