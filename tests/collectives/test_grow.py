"""What grow refuses. How it takes processes in: launch/test_rejoin.py."""

import jax
import numpy as np
import pytest

import jaxcomm

AUTO = jax.sharding.AxisType.Auto


def placed(mesh, *spec):
    return jax.device_put(np.zeros(8), jax.NamedSharding(mesh, jax.P(*spec)))


def test_while_nobody_is_missing_it_returns_what_it_was_given():
    mesh = jax.make_mesh((8,), ("i",), (AUTO,))
    state = {"params": placed(mesh), "step": 7, "note": None}
    grown, same = jaxcomm.grow(mesh, "i", state)
    assert grown is mesh
    assert same is state


@pytest.mark.parametrize(
    ("axis", "state", "error", "text"),
    [
        ("j", None, ValueError, "'j' is no axis of"),
        ("i", {"x": np.zeros(2)}, TypeError, "the state has a ndarray"),
        ("i", lambda mesh: placed(mesh, "i"), ValueError, "is sharded over 'i'"),
        ("i", lambda mesh: jax.numpy.zeros(2), ValueError, "not on the mesh"),
    ],
)
def test_what_cannot_be_copied_is_refused(axis, state, error, text):
    mesh = jax.make_mesh((8,), ("i",), (AUTO,))
    with pytest.raises(error, match=text):
        jaxcomm.grow(mesh, axis, state(mesh) if callable(state) else state)


def test_who_was_not_taken_in_does_not_take_the_others_for_lost(monkeypatch):
    mesh = jax.make_mesh((8,), ("i",), (AUTO,))
    monkeypatch.setenv("JAXCOMM_STARTS", "1")
    with pytest.raises(jaxcomm.CommunicatorError, match=r"Call jaxcomm\.grow first"):
        jaxcomm.shrink(mesh, "i")
    monkeypatch.setenv("JAXCOMM_STARTS", "again")
    with pytest.raises(ValueError, match="must be a whole number"):
        jaxcomm.grow(mesh, "i", None)
