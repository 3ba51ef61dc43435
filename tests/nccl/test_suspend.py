"""Giving a communicator's device memory back for a while."""

import jax
import jax.numpy as jnp
import pytest
from models import over

import jaxcomm

INBOX = 8 * 2**20  # of our kernels for small sums, on each device


def psum_of(mesh):
    return over(mesh, lambda x: jaxcomm.psum(x, "i"), out=jax.P())


def test_memory_is_given_back_and_taken_again(with_kernels, make_mesh):
    stand_in = with_kernels
    mesh = make_mesh(i=2)
    policy = jaxcomm.CommPolicy(share=False)
    (member,) = jaxcomm.init(mesh, "i", policy=policy)
    program = psum_of(mesh)
    x = jnp.ones(2)
    for _ in range(20):
        last = program(x)
    jax.block_until_ready(last)
    assert member.stats()["one_shot"] == "yes"
    before = member.stats()["device_bytes"]
    # A refusal is an error, and it goes on.
    stand_in.fail("ncclCommSuspend", 5)
    with pytest.raises(jaxcomm.CommunicatorError, match="suspend: ncclCommSuspend"):
        member.suspend()
    assert not member.suspended
    assert program(x) == 2
    stand_in.clear()
    member.suspend()
    member.suspend()
    assert member.suspended
    assert len(stand_in.trace("ncclCommSuspend")) == 2  # ranks
    # Our own memory stays.
    assert 2 * INBOX <= member.stats()["device_bytes"] < before
    assert "suspended" in str(jaxcomm.communicators())
    with pytest.raises(Exception, match=r"psum\(float32\[1\]\) over axes.*the "
                       r"communicator is suspended; call its resume"):  # fmt: skip
        jax.block_until_ready(program(x))
    member.resume()
    assert not member.suspended
    assert member.stats()["device_bytes"] == before
    assert program(x) == 2
    member.suspend()
    member.close()  # as it is
    assert member.closed


OLD = """
(member,) = jaxcomm.init(mesh_of(2), "i")
answer = error_of(member.suspend)
"""


def test_an_older_library_cannot(told):
    assert told(OLD, JAXCOMM_FAKE_NCCL_VERSION="22809") == (
        "CommunicatorError: suspend: NCCL 2.28.9 cannot suspend a communicator; 2.29.7 "
        "and newer can"
    )


def test_what_cannot_be_suspended_says_why(stand_in, make_mesh):
    mesh = make_mesh(i=2)
    (member,) = jaxcomm.init(mesh, "i", backend="host")
    with pytest.raises(jaxcomm.CommunicatorError, match="is of the 'host' backend"):
        member.suspend()
    member.close()
    with pytest.raises(jaxcomm.CommunicatorError, match=r"resume: .* is closed"):
        member.resume()
    (sharing,) = jaxcomm.init(mesh, "i")
    with pytest.raises(
        jaxcomm.CommunicatorError,
        match=r"suspend: the communicator over axes .* shares its memory with the "
        r"mesh's, which NCCL does not suspend; make it with CommPolicy\(share=False\)",
    ):
        sharing.suspend()
    assert not sharing.suspended
