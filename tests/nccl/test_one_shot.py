"""Small sums by this package's own kernels. The stand-in runs them on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import waiting
from models import over

import jaxcomm

INBOX = 8 * 2**20  # bytes of each device


def calls():
    return sum(one.stats()["one_shot_calls"] for one in jaxcomm.communicators())


def operand(dtype, size, rows):
    values = np.random.default_rng(size).normal(0, 50, (size * rows, 3))
    if dtype == "complex64":
        values = values + 1j * values[::-1]
    return jnp.asarray(values).astype(dtype)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("float32", 8), ("bfloat16", 3), ("float16", 8), ("int32", 2), ("uint32", 3),
        ("complex64", 2),
    ],
)  # fmt: skip
def test_a_small_sum_is_jax_lax_s_without_nccl(with_kernels, make_mesh, size, dtype):
    mesh = make_mesh(i=size)
    x = operand(dtype, size, rows=4)
    ours = over(mesh, lambda x: jaxcomm.psum(x, "i"), out=jax.P())(x)
    theirs = over(mesh, lambda x: jax.lax.psum(x, "i"), out=jax.P())(x)
    assert ours.dtype == theirs.dtype
    wide = "complex128" if dtype == "complex64" else "float64"
    np.testing.assert_allclose(
        np.asarray(ours).astype(wide),
        np.asarray(theirs).astype(wide),
        rtol={"bfloat16": 1e-2, "float16": 2e-3}.get(dtype, 1e-6),
        atol={"bfloat16": 1, "float16": 0.1}.get(dtype, 1e-4),
    )
    assert calls() == 1
    assert len(with_kernels.trace("cuLaunchKernel")) == size
    # Where it begins, and where it ends, which stands for all that waits for it.
    assert len(with_kernels.trace("cuEventRecord")) == 2 * size
    # The communicator's first use is no call of the program.
    assert not [c for c in with_kernels.trace("ncclAllReduce") if c["count"] > 1]


def test_a_policy_leaves_all_to_nccl(with_kernels, make_mesh):
    mesh = make_mesh(i=2)
    jaxcomm.init(mesh, policy=jaxcomm.CommPolicy(one_shot=False))
    with_kernels.clear()
    over(mesh, lambda x: jaxcomm.psum(x, "i"), out=jax.P())(operand("float32", 2, 4))
    assert calls() == 0
    assert jaxcomm.communicators()[0].stats()["one_shot"] == "no: not asked for"
    # The result is there when one of them has it.
    waiting.until(lambda: len(with_kernels.trace("ncclAllReduce")) == 2)


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
    x = operand("float32", 2, 4)
    jax.block_until_ready(program(x))
    one.suspend()
    assert 2 * INBOX <= one.stats()["device_bytes"] < held
    with pytest.raises(Exception, match="suspended"):
        jax.block_until_ready(program(x))
    one.resume()
    np.testing.assert_allclose(program(x), x[:4] + x[4:])
