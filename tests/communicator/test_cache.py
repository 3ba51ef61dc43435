"""The cache finds communicators by their devices, and what init chose for them."""

import types
from typing import Any

import numpy as np
import pytest

import jaxcomm
from jaxcomm.communicator import replica_groups
from jaxcomm.communicator.backends.nccl import library
from jaxcomm.communicator.cache import choices_of, for_lowering


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
    about = {"devices": gpus, "axis_names": ("i",), "shape": {"i": 2}}
    mesh: Any = types.SimpleNamespace(**about)
    partition = replica_groups.partition(replica_groups.grid_of(mesh), ("i",))
    found = for_lowering(mesh, partition, None, None)
    assert (found.platform, found.transport) == ("gpu", "xla: there is none")


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
