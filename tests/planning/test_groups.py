"""Classes of groups are what listing every group gives."""

import collections
import dataclasses

import numpy as np
import pytest

import jaxcomm
from jaxcomm.communicator import replica_groups
from jaxcomm.planning.groups import Devices, axes_of

MESHES = [
    {"data": 2, "context": 4},
    {"data": 3, "model": 8},
    {"a": 5, "b": 6, "c": 4},
    {"one": 1, "a": 7},
    {"a": 12, "b": 3},
]
MACHINES = [
    jaxcomm.Machine.named("h200"),
    jaxcomm.Machine.named("gb200"),
    dataclasses.replace(jaxcomm.Machine.named("h200"), domain=5, host=3),
]


def listed(axes, over, machine, per_process, index_groups=None):
    """The same facts of every group, one after the other."""
    size = int(np.prod(list(axes.values())))
    grid = replica_groups.DeviceGrid(
        tuple(axes), tuple(axes.values()), tuple(range(size))
    )
    found = []
    for group in replica_groups.partition(grid, over, index_groups).groups:
        domains = collections.Counter(id_ // machine.domain for id_ in group)
        hosts = collections.Counter(id_ // machine.host for id_ in group)
        processes = collections.Counter(id_ // per_process for id_ in group)
        found.append(
            (
                len(group),
                *(len(domains), len(hosts), len(processes)),
                *(min(domains.values()), min(hosts.values()), min(processes.values())),
                max(domains.values()),
            )
        )
    return found


def facts(each):
    return (
        each.size,
        *(each.domains, each.hosts, each.processes),
        *(each.per_domain, each.per_host, each.per_process),
        each.largest,
    )


@pytest.mark.parametrize("machine", MACHINES, ids=["8", "72", "5"])
@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("per_process", [None, 1, 2])
def test_classes_are_those_of_all_groups(axes, machine, per_process):
    devices = Devices(axes, machine, per_process)
    wanted = [(name,) for name in axes] + [tuple(axes), tuple(reversed(axes))]
    for over in wanted:
        expected = listed(axes, over, machine, devices.per_process)
        counted = collections.Counter()
        for each in devices.groups(over):
            counted[facts(each)] += each.count
        assert counted == collections.Counter(expected)
        codes = devices.rank_codes(over)
        of_rank = {}
        grid = replica_groups.DeviceGrid(
            tuple(axes), tuple(axes.values()), tuple(range(devices.size))
        )
        groups = replica_groups.partition(grid, over).groups
        for group, fact in zip(groups, expected, strict=True):
            of_rank |= dict.fromkeys(group, fact)
        classes = devices.groups(over)
        assert {
            rank: facts(classes[code]) for rank, code in enumerate(codes)
        } == of_rank


def test_index_groups_are_classes_too():
    machine = dataclasses.replace(MACHINES[0], domain=4, host=4)
    axes, groups = {"a": 2, "b": 6}, ((0, 1, 2, 3), (4, 5))
    devices = Devices(axes, machine, None)
    counted = collections.Counter()
    for each in devices.groups(("b",), groups):
        counted[facts(each)] += each.count
    expected = listed(axes, ("b",), machine, devices.per_process, groups)
    assert counted == collections.Counter(expected)


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
        Devices({"a": 2}, MACHINES[0], None).groups(("z",))
