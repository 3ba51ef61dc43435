"""Symmetric memory is registered once, alike everywhere, or not at all."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

import jaxcomm
from jaxcomm.communicator.backends.nccl import registration

REGISTER = ("ncclCommWindowRegister", "ncclCommRegister")


def test_registering_again_registers_nothing(stand_in, make_mesh):
    """W4: once for each segment and communicator."""
    mesh = make_mesh(i=2)
    (member,) = jaxcomm.init(mesh, "i")
    pool = jaxcomm.SymmetricPool(mesh, 1 << 18)
    stand_in.clear()
    for _ in range(3):
        pool.register_with(member.key)
    assert not stand_in.trace(*REGISTER)
    assert pool.registrations() == {member: "window"}
    stand_in.clear()
    pool.close()
    assert [c["name"] for c in stand_in.trace("ncclCommWindowDeregister")] == [
        "ncclCommWindowDeregister"
    ] * 2


GROUPS = [[2, 0], [1, 3]]


def test_what_is_gathered_instead_stays_within_its_groups(stand_in, make_mesh):
    mesh = make_mesh(i=4)
    x = models.random_values(jnp.dtype("complex64"), (4, 5), 0)
    found = models.run_stacked(
        mesh, lambda x: jaxcomm.pmax(x, "i", axis_index_groups=GROUPS), x
    )
    models.assert_identical(
        found, models.apply_by_group(mesh, ("i",), models.all_reduce("max"), x, GROUPS)
    )
    assert {m.backend for m in jaxcomm.communicators()} == {"nccl"}
    ones = np.ones((4, 2), np.int32)
    starts = np.tile(np.arange(2, dtype=np.int32), (4, 1))
    offsets = np.zeros((4, 2), np.int32)
    offsets[[0, 3]] = 1  # the rank within its group
    y = np.arange(8.0, dtype=np.float32).reshape(4, 2)

    def call(*operands):
        return jaxcomm.ragged_all_to_all(
            *operands, axis_name="i", axis_index_groups=GROUPS
        )

    found = np.asarray(
        models.run_stacked(mesh, call, y, 0 * y, starts, ones, offsets, ones)
    )
    for group in GROUPS:
        np.testing.assert_array_equal(found[group], y[group].T)


def differ(here, what):
    mesh = here.mesh(2, 2)
    a, b = jaxcomm.init(
        mesh, "i", lanes=("a", "b"), policy=jaxcomm.CommPolicy(symmetric=False)
    )
    one, two = (jaxcomm.SymmetricPool(mesh, 1 << 16) for _ in range(2))
    pool, keys = {
        "order": (one, [a.key, b.key] if here.process else [b.key, a.key]),
        "communicator": (one, [a.key] if here.process else [b.key]),
        "pool": (one if here.process else two, [a.key]),
    }[what]
    with pytest.raises(jaxcomm.CommunicatorError) as caught:
        registration.register(pool, keys)
    one.close(), two.close()
    jaxcomm.finalize()
    return str(caught.value)


@pytest.mark.multiprocess
@pytest.mark.parametrize("what", ["order", "communicator", "pool"])
def test_registrations_that_differ_fail_together(team, what):
    """W2."""
    for text in team.call(differ, what=what):
        assert (
            "about to register different symmetric memory, or in different order"
            in text
        )


def test_groups_of_one_pin_nothing(stand_in, make_mesh):
    """N3."""
    mesh = make_mesh(i=3)

    def call(x):
        return jaxcomm.psum(x, "i", axis_index_groups=[[2, 0], [1]])

    jax.jit(jax.shard_map(call, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i")))(
        jnp.arange(3.0)
    )
    (row,) = jaxcomm.memory_report()
    assert row.pinned_bytes == 2 << 20


def test_one_that_symmetric_memory_cannot_be_registered_with_is_not_made(
    stand_in, make_mesh, monkeypatch
):
    mesh = make_mesh(i=2)
    pool = jaxcomm.SymmetricPool(mesh, 1 << 18)

    def refuse(pool, keys):
        raise jaxcomm.CommunicatorError("the processes differ")

    with monkeypatch.context() as patch:
        patch.setattr(registration, "register", refuse)
        with pytest.raises(jaxcomm.CommunicatorError, match="the processes differ"):
            jaxcomm.init(mesh, "i")
    assert not jaxcomm.communicators()
    (member,) = jaxcomm.init(mesh, "i")
    assert pool.registrations() == {member: "window"}
    pool.close()


def local_ranks_alone(here):
    mesh = here.mesh(2, 2)
    jaxcomm.init(mesh, "i")
    pinned = jaxcomm.memory_report()[0].pinned_bytes
    jaxcomm.finalize()
    return pinned


@pytest.mark.multiprocess
def test_each_process_reports_the_queues_of_its_own_ranks(team):
    assert team.call(local_ranks_alone) == [2 << 20] * 2
