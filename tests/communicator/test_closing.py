"""Communicators are closed, one or all, and what is said of one that was."""

import jax
import numpy as np
import pytest

import jaxcomm

X = np.arange(8, dtype=np.float32)


def test_a_closed_communicator_is_an_error_that_names_init(
    make_mesh, counted, psum_over
):
    """P1: running looks up and never creates."""
    mesh = make_mesh(i=4)
    program = psum_over(mesh)
    program(X)
    (member,) = jaxcomm.communicators()
    member.close()
    member.close()  # harmless
    assert member.closed
    assert counted() == {"created": 1, "destroyed": 1}
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"jaxcomm\.init\(mesh"
    ) as caught:
        jax.block_until_ready(program(X))
    assert "psum(float32[2]) over axes ('i',)" in str(caught.value)
    assert counted() == {"created": 1, "destroyed": 1}
    jaxcomm.init(mesh)
    np.testing.assert_array_equal(program(X)[:2], X.reshape(4, 2).sum(0))
    assert counted() == {"created": 2, "destroyed": 1, "live": 1}


def test_the_end_of_a_with_block_closes(make_mesh):
    (member,) = jaxcomm.init(make_mesh(i=2))
    with member as inside:
        assert inside is member
        assert not member.closed
        assert "live" in repr(member)
    assert member.closed
    assert "closed" in repr(member)
    assert not any(member.stats().values())
    with pytest.raises(KeyError), jaxcomm.init(make_mesh(i=2))[0]:
        raise KeyError
    assert len(jaxcomm.communicators()) == 0


def test_the_old_handle_stays_closed_when_the_same_is_made_anew(make_mesh):
    (old,) = jaxcomm.init(make_mesh(i=2))
    old.close()
    (new,) = jaxcomm.init(make_mesh(i=2))
    old.close()
    assert (old.closed, new.closed) == (True, False)
    assert old.key == new.key


def test_finalize_closes_all_and_may_be_called_again(make_mesh, counted):
    made = jaxcomm.init(make_mesh(a=2, b=2))
    jaxcomm.finalize()
    jaxcomm.finalize()
    assert all(member.closed for member in made)
    assert counted() == {"created": 3, "destroyed": 3}


def test_finalize_forgets_the_chosen_backends(make_mesh):
    mesh = make_mesh(i=4)
    jaxcomm.init(mesh, backend="xla")
    jaxcomm.finalize()
    assert len(jaxcomm.communicators()) == 0
    assert jaxcomm.init(mesh)[0].backend == "host"
