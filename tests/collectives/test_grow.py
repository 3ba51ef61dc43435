"""What grow refuses and copies. How it takes processes in: launch/test_rejoin.py."""

import importlib

import jax
import numpy as np
import pytest

import jaxcomm
from jaxcomm.communicator import growth, presence, rendezvous

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


def test_a_row_that_comes_back_is_copied_to_devices_of_who_stayed():
    """Its other devices were of a process that ended, so the row left as a whole."""
    mesh = jax.make_mesh((3, 2), ("i", "j"), (AUTO, AUTO), devices=jax.devices()[:6])
    row = jax.sharding.Mesh(mesh.devices[:1], ("i", "j"))
    x = jax.device_put(np.arange(8.0), jax.NamedSharding(row, jax.P("j")))
    module = importlib.import_module("jaxcomm.collectives.grow")
    (copied,) = module._copied(mesh, "i", 0, [x], [jax.P("j")])
    assert copied.sharding.device_set == {*mesh.devices.flat}
    for shard in copied.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.arange(8.0)[shard.index])


def test_who_hangs_while_it_is_taken_in_is_given_up(monkeypatch):
    """The launcher kills it, and starts it once more."""
    mesh = jax.make_mesh((8,), ("i",), (AUTO,))
    late = rendezvous.LateError("process 1 did not come", [0, 1])

    def share(*arguments):
        raise late

    given_up = []
    module = importlib.import_module("jaxcomm.collectives.grow")
    monkeypatch.setattr(growth, "take_in", lambda *arguments: (mesh, 0, 0))
    monkeypatch.setattr(module, "_share", share)
    monkeypatch.setattr(presence, "_tell_launcher", given_up.append)
    with pytest.raises(jaxcomm.CommunicatorError, match="did not come"):
        jaxcomm.grow(mesh, "i", None)
    assert given_up == [1]


def test_who_was_not_taken_in_does_not_take_the_others_for_lost(monkeypatch):
    mesh = jax.make_mesh((8,), ("i",), (AUTO,))
    monkeypatch.setenv("JAXCOMM_STARTS", "1")
    with pytest.raises(jaxcomm.CommunicatorError, match=r"Call jaxcomm\.grow first"):
        jaxcomm.shrink(mesh, "i")
    monkeypatch.setenv("JAXCOMM_STARTS", "again")
    with pytest.raises(ValueError, match="must be a whole number"):
        jaxcomm.grow(mesh, "i", None)
