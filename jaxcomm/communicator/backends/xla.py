"""XLA's own collectives: for every platform, and to compare with."""

from collections.abc import Sequence

import jax

from jaxcomm.communicator.backends.backend import (
    Backend,
    CommunicatorSpec,
    Connection,
    Status,
)
from jaxcomm.communicator.replica_groups import Partition


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
