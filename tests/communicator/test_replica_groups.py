import dataclasses

import pytest

from jaxcomm.communicator import replica_groups
from jaxcomm.communicator.replica_groups import DeviceGrid, in_mesh_order, partition

CUBE = DeviceGrid(("a", "b", "c"), (2, 3, 2), tuple(range(100, 112)), "cpu")


def test_groups_differ_in_the_other_axes_and_index_groups_divide_them_further():
    assert partition(CUBE, ("c", "a")).groups == (
        (100, 106, 101, 107), (102, 108, 103, 109), (104, 110, 105, 111),
    )  # fmt: skip
    part = partition(CUBE, ("b",), ((2, 0), (1,)))
    assert part.index_groups == ((2, 0), (1,))
    assert part.groups[:2] == ((104, 100), (102,))
    assert part.sizes == (2, 1) * 4


def test_the_key_tells_apart_all_that_matters():
    def key(grid=CUBE, axes=("a",), groups=None, lane="default", backend="host"):
        part = partition(grid, axes, groups)
        return replica_groups.key(part, lane, backend)

    keys = [
        key(),
        key(axes=("b",)),
        key(axes=("a", "b")),
        key(axes=("b", "a")),
        key(groups=((0,), (1,))),
        key(groups=((1,), (0,))),
        key(lane="other"),
        key(backend="xla"),
        key(dataclasses.replace(CUBE, device_ids=CUBE.device_ids[::-1])),
        key(dataclasses.replace(CUBE, shape=(3, 2, 2))),
        key(dataclasses.replace(CUBE, platform="gpu")),
        key(dataclasses.replace(CUBE, axis_names=("x", "b", "c")), ("x",)),
    ]
    assert len(set(keys)) == len(keys)
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_axes_are_put_in_the_order_of_the_mesh_around_those_of_vmap():
    assert in_mesh_order(("c", "a"), CUBE.axis_names) == ("a", "c")
    assert in_mesh_order(("b", "v", "a"), CUBE.axis_names) == ("a", "v", "b")
    with pytest.raises(ValueError, match=r"axes \('a', 'a'\) name an axis twice"):
        in_mesh_order(("a", "a"), CUBE.axis_names)
