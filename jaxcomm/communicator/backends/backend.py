"""What every backend offers."""

import abc
import dataclasses
from typing import TYPE_CHECKING, Any

from jaxcomm import _ffi
from jaxcomm.communicator.neighbors import Neighbors

if TYPE_CHECKING:
    from collections.abc import Sequence

    import jax

    from jaxcomm.communicator import replica_groups
    from jaxcomm.communicator.communicator import Communicator


@dataclasses.dataclass(frozen=True)
class Choice:
    """What serves a partition.

    Attributes:
      backend: makes its communicator.
      transport: how bytes travel, as :class:`jaxcomm.Communicator` tells it.
      neighbors: the processes that share memory, where groups span several.
      processes: by group and rank, the index of the rank's process among
        ``neighbors.members``, -1 for processes of other hosts.
    """

    backend: "Backend"
    transport: str
    neighbors: Neighbors | None = None
    processes: tuple[tuple[int, ...], ...] = ()


class Backend(abc.ABC):
    """Makes communicators and ends them.

    Attributes:
      name: as users write it.
      platforms: those whose devices it serves where nobody chose a backend.
      is_ours: whether operations are custom calls of ours, which count and record what
        they do, and not XLA's own.
      takes_policy: whether a :class:`jaxcomm.CommPolicy` says how it makes them.
      orders_lanes: whether operations of one lane run one after the other.
    """

    name: str
    platforms: tuple[str, ...] = ()
    is_ours: bool = True
    takes_policy: bool = False
    orders_lanes: bool = False

    @abc.abstractmethod
    def choice(
        self, mesh: "jax.sharding.Mesh", part: "replica_groups.Partition"
    ) -> Choice | str:
        """Returns how it serves a partition of a mesh, or why it cannot.

        The same on every process of the mesh, each of which asks.

        Raises:
          CommunicatorError: if it had to ask other processes, and they did not come.
        """

    @abc.abstractmethod
    def make(
        self,
        member: "Communicator",
        mesh: "jax.sharding.Mesh",
        part: "replica_groups.Partition",
        choice: Choice,
        live: "Sequence[Communicator]",
    ) -> dict[str, int]:
        """Makes a communicator that is described so far; ``live`` are there already.

        Returns:
          What is to be added to :class:`jaxcomm.communicator.stats.Counters`.

        Raises:
          CommunicatorError: if it could not; nothing is left of it then.
        """

    def end(self, member: "Communicator") -> None:
        """Ends one that :meth:`make` made; whoever waits in it gets an error."""
        _ffi.destroy(member.key)

    def forget(self) -> None:  # noqa: B027 -- most remember nothing
        """Drops what it remembers beside live communicators: there are none left."""

    def memory(
        self, member: "Communicator", live: "Sequence[Communicator]"
    ) -> dict[str, Any]:
        """Returns fields of :class:`stats.MemoryRow` that are not 0.

        Those that :meth:`jaxcomm.Communicator.stats` tells are not among them.
        """
        return {}
