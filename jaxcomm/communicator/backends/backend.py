"""What a backend is asked for, what it gives, and what every backend offers."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxcomm._built import _ffi
from jaxcomm.communicator import replica_groups
from jaxcomm.communicator.lane import DEFAULT_LANE
from jaxcomm.communicator.neighbors import Neighbors
from jaxcomm.communicator.policy import CommPolicy, RowMover
from jaxcomm.communicator.replica_groups import DeviceGrid, Partition


@dataclasses.dataclass(frozen=True)
class CommunicatorSpec:
    """A communicator to find or to make.

    Attributes:
      mesh: whose devices it joins.
      partition: the groups it divides them into.
      lane: its name among the communicators of the partition.
      backend: what makes it.
      policy: how NCCL makes it; None if the backend takes no policy.
      timeout: seconds a rank waits for the others.
      refusal: why XLA serves it in place of the platform's own backend; else "".
    """

    mesh: jax.sharding.Mesh
    partition: Partition
    lane: str
    backend: "Backend"
    policy: CommPolicy | None
    timeout: float
    refusal: str = ""

    @property
    def grid(self) -> DeviceGrid:
        """The devices of the mesh, in order."""
        return self.partition.grid

    @functools.cached_property
    def key(self) -> int:
        """The content hash by which compiled programs name the communicator."""
        policy = "" if self.policy is None else repr(self.policy)
        return replica_groups.key(self.partition, self.lane, self.backend.name, policy)

    @property
    def platform(self) -> str:
        """The platform of its devices, as JAX names it."""
        return self.grid.platform

    @property
    def size(self) -> int:
        """The number of devices of its largest group."""
        return max(self.partition.sizes)

    @property
    def is_default_lane(self) -> bool:
        """Whether calls without a lane use it."""
        return self.lane == DEFAULT_LANE

    @property
    def processes(self) -> tuple[int, ...]:
        """The processes that have devices in the mesh, in order."""
        return processes_of(self.mesh)

    def __str__(self) -> str:
        """Name it in a message."""
        return f"axes {self.partition.axes} (lane {self.lane!r})"


def processes_of(mesh: jax.sharding.Mesh) -> tuple[int, ...]:
    """Return the processes that have devices in a mesh, in order."""
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


@dataclasses.dataclass
class Connection:
    """What a backend made for a communicator, and keeps until its end.

    Attributes:
      transport: how bytes travel, as :attr:`jaxcomm.Communicator.transport` says it.
      counted: what to add to :class:`~jaxcomm.communicator.table.Counters`.
      neighbors: the processes that share memory, if groups span several.
      world: NCCL's communicator of the whole mesh, which this one was split off.
      row_mover: see :func:`~jaxcomm.communicator.policy.row_mover`.
    """

    transport: str
    counted: Mapping[str, int] = dataclasses.field(default_factory=dict)
    neighbors: Neighbors | None = None
    world: "_ffi.NcclWorld | None" = None
    row_mover: RowMover | None = None


@dataclasses.dataclass(frozen=True)
class Status:
    """Whether a backend can be used in this process.

    Attributes:
      is_available: whether it can.
      text: a line about it, or why not.
      is_fine: False if that is a problem of this process; None if nobody may want it.
      details: what else there is to know, of JSON's types.
    """

    is_available: bool
    text: str
    is_fine: bool | None = True
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Backend(abc.ABC):
    """Makes communicators and ends them.

    Attributes:
      name: as users write it.
      platforms: platforms whose devices it serves if nobody chose a backend.
      ffi_platform: the name by which ``jax.ffi`` knows these platforms.
      is_ours: whether its operations are custom calls of this package, which counts
        and records them, and not XLA's own.
      takes_policy: whether a :class:`jaxcomm.CommPolicy` says how it makes them.
      orders_lanes: whether operations of one lane run one after the other.
      adds_in_tree: whether its sums have the order of ``primitives/tree.py`` always.
      can_stop: whether a failure may forbid further use: see :meth:`check_usable`.
    """

    name: str
    platforms: tuple[str, ...] = ()
    ffi_platform: str = ""
    is_ours: bool = True
    takes_policy: bool = False
    orders_lanes: bool = False
    adds_in_tree: bool = False
    can_stop: bool = False

    @abc.abstractmethod
    def refusal(self, mesh: jax.sharding.Mesh, partition: Partition) -> str | None:
        """Return why it cannot serve a partition of a mesh, None if it can.

        The same on every process of the mesh, each of which asks.

        Raises:
          CommunicatorError: if it had to ask other processes, and they did not come.
        """

    @abc.abstractmethod
    def make(
        self, spec: CommunicatorSpec, live: Sequence[CommunicatorSpec]
    ) -> Connection:
        """Make a communicator; ``live`` are there already.

        Raises:
          CommunicatorError: if it could not; nothing is left of it then.
        """

    def prepare(  # noqa: B027 -- most need nothing more
        self, spec: CommunicatorSpec, collective: str
    ) -> None:
        """Make what calls of a collective need, before a program that has one runs.

        Raises:
          CommunicatorError: if it could not.
        """

    def end(self, spec: CommunicatorSpec, connection: Connection) -> None:
        """End what :meth:`make` made. Ranks that wait in it raise."""
        _ffi.destroy(spec.key)

    def forget(  # noqa: B027 -- most remember nothing
        self, is_over: Callable[[Sequence[int]], bool]
    ) -> None:
        """Drop what it remembers of sets of processes for which ``is_over`` is true.

        All of their processes that live do so, and have no communicators left. Of a
        backend that :attr:`can_stop`, there are none at all.
        """

    def check_usable(self) -> None:  # noqa: B027 -- most stay usable
        """Raise CommunicatorError if an earlier failure forbids further use."""

    def status(self) -> Status:
        """Return whether it can be used in this process; starts JAX's devices."""
        return Status(True, "available")

    def memory(
        self,
        spec: CommunicatorSpec,
        connection: Connection,
        live: Sequence[Connection],
    ) -> dict[str, Any]:
        """Return fields of a :class:`~jaxcomm.communicator.memory.MemoryRow` but 0.

        Fields that :meth:`jaxcomm.Communicator.stats` reports are not among them.
        """
        return {}

    def target(self, spec: CommunicatorSpec, collective: str, is_start: bool) -> str:
        """Return the name of its custom calls of a collective, or of their starts."""
        return f"jaxcomm.{collective}{'.start' if is_start else ''}"
