"""Operations that fail or hang: who says what, and what becomes of results.

Poisoned results leave the process as it was, so these tests share one. Where GPUs are
stopped, each has a process of its own: test_stopped.py. The fault suite has the rest,
each fault with each policy: test_faults.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import over

import jaxcomm
from jaxcomm import _ffi

INTERNAL_ERROR = 3
POISON = jaxcomm.CommPolicy(on_failure="poison")


def summed(mesh):
    return over(mesh, lambda x: jaxcomm.psum(x, "i"), check_vma=False)


def error_of(program, x):
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(program(x))
    return str(caught.value)


def is_poison(result):
    return np.asarray(result).tobytes() == b"\xff" * result.nbytes


@pytest.fixture(autouse=True)
def works_again(stand_in, make_mesh):
    yield
    jaxcomm.finalize()
    # Communicators made from now on do not report an older one's failure.
    assert _ffi.first_failure() == ""
    mesh = make_mesh(i=3)
    jaxcomm.init(mesh, policy=POISON)
    np.testing.assert_array_equal(summed(mesh)(jnp.arange(3.0)), [3, 3, 3])


def test_nothing_is_stopped_or_poisoned_where_nothing_is_on_its_way(
    stand_in, make_mesh
):
    """The GPUs would be stopped, and with them all tests after this."""
    mesh = make_mesh(i=3)
    jaxcomm.init(mesh)
    program, x = summed(mesh), jnp.arange(3.0)
    jax.block_until_ready(program(x))
    # All ranks: what another had given already would be on its way.
    for rank in range(3):
        stand_in.fail("ncclAllReduce", INTERNAL_ERROR, after=rank)
    for _ in range(2):
        error = error_of(program, x)
        assert "ncclAllReduce: internal error" in error
        assert (
            "Nothing was on its way. Call jaxcomm.finalize() in every process, then "
            "jaxcomm.init()" in error
        )
    # Ranks that were refused first did not come to theirs.
    stand_in.forget_faults()


@pytest.mark.parametrize("function", ["ncclSend", "ncclGroupEnd"])
def test_a_hop_that_nccl_refuses_leaves_no_group_open(stand_in, make_mesh, function):
    mesh = make_mesh(i=2)
    jaxcomm.init(mesh, policy=POISON)
    program = over(mesh, lambda x: jaxcomm.ppermute(x, "i", [(0, 1), (1, 0)]))
    x = jnp.arange(2.0)
    jax.block_until_ready(program(x))
    stand_in.fail(function, INTERNAL_ERROR)
    error = error_of(program, x)
    assert "ppermute(float32[1]) with parameters [1, 0] over axes ('i',)" in error
    assert f"{function}: internal error" in error


def test_every_program_in_flight_ends(stand_in, make_mesh):
    mesh = make_mesh(i=2)
    jaxcomm.init(mesh, policy=POISON)
    program, x = summed(mesh), jnp.arange(2.0)
    jax.block_until_ready(program(x))
    stand_in.clear()
    stand_in.hang("ncclAllReduce", after=4)
    outs = [program(x) for _ in range(20)]
    stand_in.until_called("ncclAllReduce", 6)
    stand_in.async_error(stand_in.trace("ncclAllReduce")[4])
    ended = []
    for out in outs:
        try:
            ended.append("poison" if is_poison(out) else out.tolist())
        except jax.errors.JaxRuntimeError as error:
            is_told = "An asynchronous error that a test asked for" in str(error)
            ended.append("raised" if is_told else error)
    assert ended[:2] == [[1, 1]] * 2
    # The one that hung, and those behind it: poisoned where they were on their way.
    assert ended[2] == "poison"
    assert set(ended[3:]) <= {"poison", "raised"}
