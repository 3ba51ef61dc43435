"""Which backend serves a partition, and over which transport.

A decision that differed between processes would be a deadlock: it depends on the
arguments, on the environment, which is to be the same everywhere, and on what all
processes of the mesh told each other.
"""

import dataclasses

import jax

from jaxcomm import bootstrap, config
from jaxcomm.errors import CommunicatorError
from jaxcomm.nccl import communicators as nccl
from jaxcomm.nccl import library as nccl_library

BACKENDS = ("host", "nccl", "xla")


@dataclasses.dataclass(frozen=True)
class Choice:
    """What serves a partition.

    Attributes:
      backend: ``"host"``, ``"nccl"`` or ``"xla"``.
      transport: how bytes travel, as :class:`jaxcomm.Communicator` tells it.
      neighbors: the processes that share memory, where groups span several.
      processes: by group and rank, the index of the rank's process among
        ``neighbors.members``, -1 for processes of other hosts.
    """

    backend: str
    transport: str
    neighbors: bootstrap.Neighbors | None = None
    processes: tuple[tuple[int, ...], ...] = ()


def choose(mesh, part, lane: str, backend: str | None) -> Choice:
    """Returns what serves the partition of a mesh.

    Where groups span processes and the platform is CPU, the processes of the mesh meet
    first: each of them must ask.

    Raises:
      ValueError: if there is no such backend.
      CommunicatorError: if it cannot serve these devices, or processes did not come.
    """
    backend = config.backend() if backend is None else backend
    if backend is not None and backend not in BACKENDS:
        raise ValueError(
            f"backend {backend!r} is unknown; choose one of {BACKENDS}, or None to "
            f"let the platform choose"
        )
    platform = mesh.devices.flat[0].platform
    if backend == "xla":
        return Choice("xla", "xla")
    if backend == "nccl" or (backend is None and platform == "gpu"):
        return _choose_nccl(mesh, part, lane, backend)
    if backend is None and platform != "cpu":
        return Choice("xla", "xla")
    if platform != "cpu":
        raise CommunicatorError(
            f"backend 'host' moves bytes of CPU devices; axes {part.axes} (lane "
            f"{lane!r}) are of {platform} devices. Use backend='xla'."
        )
    process_of = {device.id: device.process_index for device in mesh.devices.flat}
    spans = [{process_of[device] for device in group} for group in part.groups]
    if all(len(processes) == 1 for processes in spans):
        return Choice("host", "memory")
    everyone = tuple(sorted(set(process_of.values())))
    neighbors = bootstrap.neighbors(everyone, jax.process_index())
    refusals = [neighbors.refusal(processes) for processes in spans]
    refusal = next((text for text in refusals if text), None)
    if refusal is None:
        index = {process: i for i, process in enumerate(neighbors.members)}
        processes = tuple(
            tuple(index.get(process_of[device], -1) for device in group)
            for group in part.groups
        )
        return Choice("host", "shared memory", neighbors, processes)
    if backend == "host":
        raise CommunicatorError(
            f"backend 'host' cannot join the groups of axes {part.axes} (lane "
            f"{lane!r}): {refusal}. Use backend='xla'."
        )
    return Choice("xla", f"xla: {refusal}")


def _choose_nccl(mesh, part, lane, backend):
    refusal = nccl.refusal(mesh)
    if refusal is None:
        found = nccl_library.load()
        assert not isinstance(found, str)  # which would be a refusal
        return Choice("nccl", f"NCCL {found.version}")
    if backend == "nccl":
        raise CommunicatorError(
            f"backend 'nccl' cannot join the groups of axes {part.axes} (lane "
            f"{lane!r}): {refusal}. Use backend='xla', or None to let the platform "
            f"choose."
        )
    return Choice("xla", f"xla: {refusal}")
