"""What :func:`jaxcomm.init` chose, for programs that are lowered later."""

import dataclasses

from jaxcomm.communicator.policy import CommPolicy
from jaxcomm.communicator.replica_groups import DeviceGrid, Partition


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
    """Choices by mesh, axes and lane."""

    def __init__(self):
        self._chosen: dict[tuple, Choice] = {}

    def record(
        self, grid: DeviceGrid, partition: Partition, lane: str, choice: Choice
    ) -> None:
        """Remember a choice for a partition."""
        for axes in (partition.axes, frozenset(partition.axes)):
            self._chosen[grid, axes, partition.index_groups, lane] = choice

    def find(self, grid: DeviceGrid, partition: Partition, lane: str) -> Choice:
        """Return the choice for a partition.

        A choice for axes holds for index groups within them, and for the same axes in
        another order: permutes count ranks in the mesh's order of axes, whatever order
        ``init`` was given.
        """
        for index_groups in (partition.index_groups, None):
            for axes in (partition.axes, frozenset(partition.axes)):
                found = self._chosen.get((grid, axes, index_groups, lane))
                if found is not None:
                    return found
        return Choice()

    def clear(self) -> None:
        """Forget all choices."""
        self._chosen.clear()
