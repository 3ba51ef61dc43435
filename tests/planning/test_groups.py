"""Classes of groups are what listing every group gives."""

import collections
import dataclasses
import math

import pytest

import jaxcomm
from jaxcomm.communicator import replica_groups
from jaxcomm.planning.communicators import Devices, axes_of

MACHINES = {name: jaxcomm.Machine.named(name) for name in ("h200", "gb200")}
MACHINES["odd"] = dataclasses.replace(MACHINES["h200"], domain=5, host=3)
MACHINES["four"] = dataclasses.replace(MACHINES["h200"], domain=4, host=4)


def listed(axes, over, machine, per_process, index_groups):
    """The same facts of every group, one after the other."""
    devices = tuple(range(math.prod(axes.values())))
    grid = replica_groups.DeviceGrid(tuple(axes), tuple(axes.values()), devices, "cpu")
    found = {}
    for group in replica_groups.partition(grid, over, index_groups).groups:
        domains, hosts, processes = (
            collections.Counter(device // size for device in group).values()
            for size in (machine.domain, machine.host, per_process)
        )
        found[group] = (
            *(len(group), len(domains), len(hosts), len(processes)),
            max(domains),
        )
    return found


def facts(each):
    return each.size, each.domains, each.hosts, each.processes, each.largest


@pytest.mark.parametrize(
    ("axes", "machine", "per_process", "index_groups"),
    [
        ({"data": 2, "context": 4}, "h200", None, None),
        ({"data": 3, "model": 8}, "h200", 3, None),
        ({"a": 5, "b": 6, "c": 4}, "gb200", 1, None),
        ({"one": 1, "a": 7}, "odd", 2, None),
        ({"a": 12, "b": 3}, "odd", None, None),
        ({"a": 2, "b": 6}, "four", None, ((0, 1, 2, 3), (4, 5))),
    ],
)
def test_classes_are_those_of_all_groups(axes, machine, per_process, index_groups):
    machine = MACHINES[machine]
    devices = Devices(axes, machine, per_process)
    overs = [*((name,) for name in axes), tuple(axes), tuple(reversed(axes))]
    for over in [("b",)] if index_groups else overs:
        expected = listed(axes, over, machine, devices.per_process, index_groups)
        classes = devices.groups(over, index_groups)
        counted = {facts(each): each.count for each in classes}
        assert len(counted) == len(classes)
        assert counted == collections.Counter(expected.values())


@pytest.mark.parametrize(
    ("mesh", "error", "text"),
    [
        ({}, TypeError, "must be a dictionary of axis sizes"),
        ((2, 4), TypeError, "must be a dictionary of axis sizes"),
        ({"a": 0}, ValueError, "'a' must have a positive size, got 0"),
        ({"a": True}, TypeError, "is no axis and its size"),
        ({3: 2}, TypeError, "is no axis and its size"),
    ],
)
def test_what_is_no_mesh_is_refused(mesh, error, text):
    with pytest.raises(error, match=text):
        axes_of(mesh)
