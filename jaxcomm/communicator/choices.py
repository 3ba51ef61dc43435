"""What :func:`jaxcomm.init` chose, which programs compiled later use."""

import dataclasses

from jaxcomm.communicator.lane import DEFAULT_LANE
from jaxcomm.communicator.policy import CommPolicy
from jaxcomm.communicator.replica_groups import DeviceGrid, Partition
from jaxcomm.errors import CommunicatorError


@dataclasses.dataclass(frozen=True)
class Choice:
    """What somebody chose about a communicator; None where nobody did.

    Attributes:
      backend: name of its backend.
      policy: how NCCL makes it.
      timeout: seconds a rank waits for the others.
    """

    backend: str | None = None
    policy: CommPolicy | None = None
    timeout: float | None = None


class Choices:
    """Choices by mesh, axes and lane; and the lanes declared, by mesh."""

    def __init__(self):
        self._chosen: dict[tuple, Choice] = {}
        self._lanes: dict[DeviceGrid, set[str]] = {}

    def record(self, partition: Partition, lane: str, choice: Choice) -> None:
        """Remember a choice for a partition."""
        grid = partition.grid
        for axes in (partition.axes, frozenset(partition.axes)):
            self._chosen[grid, axes, partition.index_groups, lane] = choice
        self._lanes.setdefault(grid, {DEFAULT_LANE}).add(lane)

    def check_lane(self, grid: DeviceGrid, lane: str) -> None:
        """Raise CommunicatorError if ``init`` declared lanes of a mesh, but not this.

        Without ``init`` there is no list to compare with, and every lane is good: a
        first program needs no setup.
        """
        declared = self._lanes.get(grid)
        if declared is None or lane in declared:
            return
        names = ", ".join(map(repr, sorted(declared)))
        raise CommunicatorError(
            f"lane {lane!r} is not declared for this mesh of axes {grid.axis_names}: "
            f"its lanes are {names}. Use one of them, or declare it on every process: "
            f"jaxcomm.init(mesh, lanes=({lane!r},))"
        )

    def find(self, partition: Partition, lane: str) -> Choice:
        """Return the choice for a partition.

        A choice for axes holds for index groups within them, and for the same axes in
        another order: permutes count ranks in the mesh's order of axes, whatever order
        ``init`` was given.
        """
        for index_groups in (partition.index_groups, None):
            for axes in (partition.axes, frozenset(partition.axes)):
                found = self._chosen.get((partition.grid, axes, index_groups, lane))
                if found is not None:
                    return found
        return Choice()

    def move(self, old: DeviceGrid, new: DeviceGrid) -> None:
        """Choose for a grid what was chosen for another of the same axes."""
        for (grid, axes, index_groups, lane), choice in list(self._chosen.items()):
            # Groups are of another size then: the next program with some says which.
            if grid == old and index_groups is None:
                self._chosen[new, axes, None, lane] = choice
        if old in self._lanes:
            self._lanes[new] = self._lanes[old] | self._lanes.get(new, set())

    def snapshot(self, grid: DeviceGrid | None) -> frozenset:
        """Return the choices for a grid, or for all, as a value to compare."""
        return frozenset(
            (where, choice)
            for where, choice in self._chosen.items()
            if grid is None or where[0] == grid
        )

    def clear(self) -> None:
        """Forget all choices."""
        self._chosen.clear()
        self._lanes.clear()
