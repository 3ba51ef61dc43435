"""XLA's own collectives, and what stands for backends where there is no extension."""

from collections.abc import Callable, Sequence

import jax

from jaxcomm._built import ABSENCE
from jaxcomm.communicator import rendezvous
from jaxcomm.communicator.backends.backend import (
    Backend,
    CommunicatorSpec,
    Connection,
    Status,
    processes_of,
)
from jaxcomm.communicator.replica_groups import Partition
from jaxcomm.errors import CommunicatorError


class XlaBackend(Backend):
    """Lowers every call to XLA's collective of the same meaning."""

    name = "xla"
    is_ours = False

    def refusal(self, mesh: jax.sharding.Mesh, partition: Partition) -> None:
        """Serve everything."""

    def make(
        self, spec: CommunicatorSpec, live: Sequence[CommunicatorSpec]
    ) -> Connection:
        """Make nothing: XLA has communicators of its own."""
        transport = f"xla: {spec.refusal}" if spec.refusal else "xla"
        return Connection(transport, {"borrowed": 1})

    def end(self, spec: CommunicatorSpec, connection: Connection) -> None:
        """End nothing."""

    def status(self) -> Status:
        """Serve always."""
        return Status(True, "available, XLA's own collectives")


class AbsentBackend(Backend):
    """Has the name and the platforms of a backend, and serves nobody."""

    def __init__(self, backend: Backend):
        self.name = backend.name
        self.platforms = backend.platforms
        self.ffi_platform = backend.ffi_platform
        self.takes_policy = backend.takes_policy
        self.orders_lanes = backend.orders_lanes
        self._met: set[tuple[int, ...]] = set()

    def refusal(self, mesh: jax.sharding.Mesh, partition: Partition) -> str:
        """Say why there is no such backend here.

        Processes meet first. One that has the extension would wait for the others in a
        rendezvous, which says that not all have the same jaxcomm.
        """
        processes = processes_of(mesh)
        is_served = mesh.devices.flat[0].platform in self.platforms
        if is_served and processes not in self._met:
            me = jax.process_index()
            rendezvous.exchange(processes, me, "no extension", None)
            self._met.add(processes)
        return ABSENCE

    def forget(self, is_over: Callable[[Sequence[int]], bool]) -> None:
        """Have processes meet again."""
        self._met = {each for each in self._met if not is_over(each)}

    def make(
        self, spec: CommunicatorSpec, live: Sequence[CommunicatorSpec]
    ) -> Connection:
        """Refuse, as :meth:`refusal` did."""
        raise CommunicatorError(ABSENCE)

    def status(self) -> Status:
        """Serve nobody, which is fine where XLA is to communicate."""
        text = "unavailable without the compiled extension"
        return Status(False, text, None, {"reason": text})
