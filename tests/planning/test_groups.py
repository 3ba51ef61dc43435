"""Classes of groups are what listing every group gives."""

import collections
import dataclasses

import numpy as np
import pytest

import jaxcomm
from jaxcomm.communicator import replica_groups
from jaxcomm.planning.groups import Devices, axes_of

MACHINES = {name: jaxcomm.Machine.named(name) for name in ("h200", "gb200")}
MACHINES["odd"] = dataclasses.replace(MACHINES["h200"], domain=5, host=3)
FOUR = dataclasses.replace(MACHINES["h200"], domain=4, host=4)


def listed(axes, over, machine, per_process, index_groups=None):
    """The same facts of every group, one after the other."""
    size = int(np.prod(list(axes.values())))
    grid = replica_groups.DeviceGrid(
        tuple(axes), tuple(axes.values()), tuple(range(size))
    )
    found = {}
    for group in replica_groups.partition(grid, over, index_groups).groups:
        domains = collections.Counter(id_ // machine.domain for id_ in group)
        hosts = collections.Counter(id_ // machine.host for id_ in group)
        processes = collections.Counter(id_ // per_process for id_ in group)
        found[group] = (
            len(group),
            *(len(domains), len(hosts), len(processes)),
            *(min(domains.values()), min(hosts.values()), min(processes.values())),
            max(domains.values()),
        )
    return found


def facts(each):
    return (
        each.size,
        *(each.domains, each.hosts, each.processes),
        *(each.per_domain, each.per_host, each.per_process),
        each.largest,
    )


@pytest.mark.parametrize(
    ("axes", "machine", "per_process"),
    [
        ({"data": 2, "context": 4}, "h200", None),
        ({"data": 3, "model": 8}, "h200", 3),
        ({"a": 5, "b": 6, "c": 4}, "gb200", 1),
        ({"one": 1, "a": 7}, "odd", 2),
        ({"a": 12, "b": 3}, "odd", None),
    ],
)
def test_classes_are_those_of_all_groups(axes, machine, per_process):
    machine = MACHINES[machine]
    devices = Devices(axes, machine, per_process)
    for over in [*((name,) for name in axes), tuple(axes), tuple(reversed(axes))]:
        expected = listed(axes, over, machine, devices.per_process)
        classes = devices.groups(over)
        counted = collections.Counter()
        for each in classes:
            counted[facts(each)] += each.count
        assert counted == collections.Counter(expected.values())
        codes = devices.rank_codes(over)
        assert {rank: facts(classes[code]) for rank, code in enumerate(codes)} == {
            rank: fact for group, fact in expected.items() for rank in group
        }


def test_index_groups_are_classes_too():
    axes, groups = {"a": 2, "b": 6}, ((0, 1, 2, 3), (4, 5))
    devices = Devices(axes, FOUR, None)
    counted = collections.Counter()
    for each in devices.groups(("b",), groups):
        counted[facts(each)] += each.count
    expected = listed(axes, ("b",), FOUR, devices.per_process, groups)
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


def test_an_axis_that_the_mesh_lacks_is_named():
    with pytest.raises(ValueError, match="axis 'z' is not an axis of the mesh"):
        Devices({"a": 2}, FOUR, None).groups(("z",))
