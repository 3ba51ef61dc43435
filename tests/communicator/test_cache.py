"""The cache finds communicators by their devices, and what init chose for them."""

import types
from typing import Any

import numpy as np
import pytest
import waiting

import jaxcomm
from jaxcomm.communicator import (
    cache,
    hosts,
    rendezvous,
    replica_groups,
    settling,
    shutdown,
)
from jaxcomm.communicator.backends.nccl import library
from jaxcomm.communicator.cache import choices_of, for_lowering


def mesh_of(devices) -> Any:
    about = {"devices": devices, "axis_names": ("i",), "shape": {"i": len(devices)}}
    return types.SimpleNamespace(**about)


def lowered_for(mesh, lane=None):
    partition = replica_groups.partition(replica_groups.grid_of(mesh), ("i",))
    return for_lowering(mesh, partition, lane, None)


@pytest.mark.parametrize("backend", [None, "host"])
def test_devices_of_equal_ids_on_another_platform_are_other_devices(
    make_mesh, monkeypatch, backend
):
    """JAX numbers CPU devices and GPUs from 0."""
    monkeypatch.setattr(library, "load", lambda: "there is none")
    jaxcomm.init(make_mesh(i=2), backend=backend)
    gpus = np.array(
        [types.SimpleNamespace(id=i, process_index=0, platform="gpu") for i in (0, 1)]
    )
    found = lowered_for(mesh_of(gpus))
    assert (found.platform, found.transport) == ("gpu", "xla: there is none")


def test_an_outer_block_also_has_the_keys_of_an_inner_one(make_mesh):
    with cache.used_here() as outer, cache.used_here() as inner:
        member = lowered_for(make_mesh(i=2))
    assert outer == inner == {member.key}


def test_a_program_takes_what_init_chose_for_its_lane(make_mesh):
    mesh = make_mesh(i=2)
    jaxcomm.init(mesh, lanes=("default", "other"), backend="host")
    jaxcomm.init(mesh, lanes="portable", backend="xla")
    chosen = [lowered_for(mesh, lane).backend for lane in ("other", "portable")]
    assert chosen == ["host", "xla"]


def test_choices_of_a_mesh_are_equal_while_init_chooses_the_same(make_mesh):
    mesh, other = make_mesh(a=2, b=4), make_mesh(i=4)
    nothing = choices_of(mesh)
    assert nothing == choices_of(None) == choices_of(mesh.abstract_mesh)
    jaxcomm.init(other, backend="xla", lanes="far")
    assert choices_of(mesh) == nothing
    # An abstract mesh may come to be either.
    assert choices_of(mesh.abstract_mesh) != nothing
    makes = [
        lambda: jaxcomm.init(mesh, backend="xla"),
        lambda: jaxcomm.init(mesh, backend="host", timeout=70),
        lambda: jaxcomm.init(mesh, policy=jaxcomm.CommPolicy(max_ctas=8)),
        lambda: jaxcomm.init(mesh, lanes="far"),
        lambda: jaxcomm.init(mesh, "a", backend="xla"),
        lambda: jaxcomm.init(mesh, ("b", "a"), backend="xla"),
    ]
    found = []
    for make in makes:
        jaxcomm.finalize()
        make()
        found.append(choices_of(mesh))
        make()
        assert choices_of(make_mesh(a=2, b=4)) == found[-1]
    assert len({nothing, *found}) == 7
    jaxcomm.finalize()
    assert choices_of(mesh) == nothing


@pytest.fixture
def beside_a_start(store, monkeypatch):
    """Call something while a thread waits for process 1; return what that raised."""
    monkeypatch.setattr(hosts, "publish", lambda processes, me: None)
    monkeypatch.setattr(settling, "stop", lambda: None)
    devices = [
        types.SimpleNamespace(id=i, process_index=i, platform="cpu") for i in (0, 1)
    ]
    mesh = mesh_of(np.array(devices))

    def call(action):
        def once_it_waits(process):
            waiting.until(lambda: rendezvous._meeting)
            return action(), store.now

        start = {0: lambda process: lowered_for(mesh), 1: once_it_waits}
        found, _ = store.run(start)
        return found[0], *found[1]

    return call


def test_what_shows_why_a_start_hangs_does_not_wait_for_it(beside_a_start, make_mesh):
    mesh = make_mesh(i=8)
    (live,) = jaxcomm.init(mesh)

    def look():
        str(jaxcomm.communicators()), str(jaxcomm.flight_record()), live.stats()
        (row,) = jaxcomm.memory_report()
        assert row.communicator is live
        assert jaxcomm.communicators().counters.live == 1
        assert cache.are_live([live.key])
        assert choices_of(mesh)
        # A program that needs what is there is compiled, too.
        assert lowered_for(mesh) is live
        live.close()

    raised, _, now = beside_a_start(look)
    assert now == 0
    assert live.closed
    assert isinstance(raised, rendezvous.LateError)
    assert "waited 60 s for process 1" in str(raised)


@pytest.mark.parametrize(
    ("end", "why"),
    [(jaxcomm.finalize, "jaxcomm.finalize was called"), (shutdown._at_exit, "it ends")],
)
def test_an_end_does_not_wait_for_a_start(beside_a_start, end, why):
    raised, _, now = beside_a_start(end)
    assert now == 0
    assert str(raised) == (
        "process 0 is to find out who shares memory, and waits no longer for the "
        f"others of [0, 1]: {why}"
    )
    assert not rendezvous._meeting
    assert not rendezvous._refusals
