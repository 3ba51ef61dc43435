"""CPU devices of one host: of one process, or of several that share memory."""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxcomm import compat
from jaxcomm._built import _ffi
from jaxcomm.communicator import cpu_threads, neighbors
from jaxcomm.communicator.backends.backend import (
    Backend,
    CommunicatorSpec,
    Connection,
    Status,
    processes_of,
)
from jaxcomm.communicator.neighbors import Neighbors
from jaxcomm.communicator.replica_groups import Partition


class HostBackend(Backend):
    """Moves bytes between CPU devices, whose groups each lie on one host."""

    name = "host"
    platforms = ("cpu",)
    ffi_platform = "cpu"
    adds_in_tree = True

    def __init__(self):
        # How many communicators of each key some processes made since they began to
        # share memory, in which they meet by that number: a communicator never meets
        # its predecessor.
        self._generations: dict[tuple[int, ...], collections.Counter[int]] = {}

    def refusal(self, mesh: jax.sharding.Mesh, partition: Partition) -> str | None:
        """Serve CPU devices, if the processes of each group share memory."""
        platform = mesh.devices.flat[0].platform
        if platform not in self.platforms:
            return f"it moves bytes of CPU devices, and these are {platform} devices"
        found = _neighbors(mesh, partition)
        if found is None:
            return None
        refusals = (found.refusal(set(ranks)) for ranks in _processes(mesh, partition))
        return next((text for text in refusals if text), None)

    def make(
        self, spec: CommunicatorSpec, live: Sequence[CommunicatorSpec]
    ) -> Connection:
        """Make it in the extension; in the memory its processes share, if several."""
        shared: dict[str, Any] = {}
        found = _neighbors(spec.mesh, spec.partition)
        if found is not None:
            index = {process: i for i, process in enumerate(found.members)}
            made = self._generations.setdefault(spec.processes, collections.Counter())
            generation = made[spec.key]
            made[spec.key] += 1
            shared = {
                "process_set": found.process_set,
                # -1: a process of another host.
                "processes": [
                    [index.get(process, -1) for process in ranks]
                    for ranks in _processes(spec.mesh, spec.partition)
                ],
                "generation": generation,
            }
        _ffi.create_host(
            key=spec.key,
            axes=str(spec.partition.axes),
            lane=spec.lane,
            platform=spec.platform,
            timeout_seconds=spec.timeout,
            groups=[list(group) for group in spec.partition.groups],
            hint_if_late=cpu_threads.shortage(),
            **shared,
        )
        transport = "memory" if found is None else "shared memory"
        return Connection(transport, {"created": 1}, neighbors=found)

    def forget(self, is_over: Callable[[Sequence[int]], bool]) -> None:
        """Let go of shared memory.

        Processes that made communicators a different number of times are in step again.
        """
        neighbors.forget(is_over)
        for processes in [each for each in self._generations if is_over(each)]:
            del self._generations[processes]

    def status(self) -> Status:
        """Serve where JAX has CPU devices."""
        try:
            jax.devices("cpu")
        except compat.NO_DEVICES:
            text = "unavailable: JAX has no CPU devices; see JAX_PLATFORMS"
            return Status(False, text, False, {"reason": text})
        return Status(True, "available, for CPU devices")

    def memory(
        self,
        spec: CommunicatorSpec,
        connection: Connection,
        live: Sequence[Connection],
    ) -> dict[str, Any]:
        """Report the memory that all communicators of the same processes share."""
        if connection.neighbors is None:
            return {}
        segment = connection.neighbors.segment
        return {
            "shared_bytes": 0 if segment is None else segment.resident_bytes(),
            "shared": any(
                other is not connection and other.neighbors is connection.neighbors
                for other in live
            ),
        }


def _processes(mesh: jax.sharding.Mesh, partition: Partition) -> list[list[int]]:
    """Return the process of each rank, by group."""
    process_of = {device.id: device.process_index for device in mesh.devices.flat}
    return [[process_of[device] for device in group] for group in partition.groups]


def _neighbors(mesh: jax.sharding.Mesh, partition: Partition) -> Neighbors | None:
    """Return None if each group lies within a process; else every process asks."""
    if all(len(set(ranks)) == 1 for ranks in _processes(mesh, partition)):
        return None
    return neighbors.find(processes_of(mesh), jax.process_index())
