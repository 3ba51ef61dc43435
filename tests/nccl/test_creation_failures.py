"""Communicators that cannot be made: what is said, and that nothing of them stays."""

import jax.numpy as jnp
import numpy as np
import pytest
import waiting

import jaxcomm

INTERNAL_ERROR = 3
# ffi/fake_nccl_faults_test.cc has all others.
FAILURES = {
    "ncclCommInitRankConfig": INTERNAL_ERROR,
    "ncclAllReduce": 1,
    "cuMemAlloc_v2": 2,
}


@pytest.mark.parametrize("function", FAILURES)
def test_a_failed_creation_tells_why_and_the_next_is_as_the_first(
    stand_in, make_mesh, psum_over, monkeypatch, function
):
    other = jaxcomm.init(make_mesh(a=2, b=1), "a")
    mesh, result = make_mesh(i=3), FAILURES[function]
    monkeypatch.setenv("NCCL_DEBUG_SUBSYS", "NONE")
    stand_in.fail(function, result)
    with pytest.raises(jaxcomm.CommunicatorError) as caught:
        jaxcomm.init(mesh)
    text = str(caught.value)
    assert "over axes ('i',) (lane 'default') of 3 devices" in text
    if result == INTERNAL_ERROR:
        assert f"{function}: internal error" in text
        assert "(" in text[text.index("internal error") :]  # NCCL's last error
        for memory in ("free MiB: host ", ", device ", ", /dev/shm "):
            amount = text[text.index(memory) + len(memory) :].split()[0].rstrip(",")
            assert int(amount) > 0, memory
    assert "NCCL 2.32.3 from " in text
    assert "libjaxcomm_fake_nccl.so" in text
    assert "variables set: NCCL_DEBUG_SUBSYS=NONE" in text
    assert f"live communicators: {len(other)}" in text
    assert jaxcomm.communicators().counters.live == len(other)
    jaxcomm.init(mesh)
    np.testing.assert_array_equal(psum_over(mesh)(jnp.arange(3.0)), [3, 3, 3])


NO_KERNELS = """
stand_in.fail("cuModuleLoadData", 1)
answer = [error_of(lambda: len(jaxcomm.init(mesh_of(2))))]
answer.append(jaxcomm.communicators().counters.live)
jaxcomm.init(mesh_of(2))
"""


def test_a_gpu_that_refuses_our_kernels_makes_no_communicator(told):
    """Without them it could not be stopped."""
    error, live = told(NO_KERNELS)
    assert error.startswith("CommunicatorError: ")
    assert "cuModuleLoadData: " in error
    assert live == 0


@pytest.mark.parametrize(
    ("function", "after"),
    [
        pytest.param("ncclCommInitRankConfig", 0, marks=pytest.mark.thorough),
        ("ncclCommSplit", 0),
        ("ncclAllReduce", 0),
    ],
)
def test_a_creation_that_nobody_else_comes_to_times_out(
    stand_in, make_mesh, monkeypatch, function, after
):
    monkeypatch.setenv("JAXCOMM_TIMEOUT", str(waiting.EXPIRES_SECONDS))
    stand_in.hang(function, after)
    late = f"not done after {waiting.EXPIRES_SECONDS:g} s"
    with pytest.raises(jaxcomm.CommunicatorError, match=late) as caught:
        jaxcomm.init(make_mesh(i=2))
    assert "NCCL 2.32.3 from" in str(caught.value)
    monkeypatch.undo()
    jaxcomm.init(make_mesh(i=2))
