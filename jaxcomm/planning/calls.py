"""One collective of a program, as planning sees it."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from jaxcomm.communicator.replica_groups import IndexGroups
from jaxcomm.machine import Sample


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """One collective of a program.

    Attributes:
      name: what the user called, ``"psum"``.
      collective: of the C++ planner, ``"all_reduce"``.
      axes: the axes, in the order that numbers the ranks.
      index_groups: the ``axis_index_groups``, or None.
      lane: its lane; the default one if the user named none.
      backend: what serves it: ``"host"``, ``"nccl"`` or ``"xla"``.
      is_ours: whether it is a call of jaxcomm, and not of ``jax.lax``.
      operands: of one device, as a flight record writes them: ``"float32[4,8]"``.
      bytes: of the operands of one device.
      is_split: whether it may run beside what follows it: it is split-phase, or XLA's.
    """

    name: str
    collective: str
    axes: tuple[str, ...]
    index_groups: IndexGroups
    lane: str
    backend: str
    is_ours: bool
    operands: str
    bytes: int
    is_split: bool = False


@dataclasses.dataclass(frozen=True)
class PlannedCall:
    """One collective of a step.

    Attributes:
      call: what is called, on what.
      times: how often in a step.
      transport: what carries it: ``"nccl"``, ``"memory"``, ``"shared memory"`` or
        ``"xla"``.
      domains: the most that a group spans.
      sent_bytes: by the busiest rank, each time.
      seconds: each time, from the arrival of the last rank to the end, in the group
        that takes longest. None if the machine has no samples for it.
    """

    call: TracedCall
    times: int
    transport: str
    domains: int
    sent_bytes: float
    seconds: float | None

    @property
    def bus_rate(self) -> float | None:
        """Bytes per second as nccl-tests count them; None if no time is known."""
        return self.sent_bytes / self.seconds if self.seconds else None


def measured_seconds(
    samples: Iterable[Sample],
    collective: str,
    transport: str,
    ranks: int,
    size: int,
    devices: int,
) -> float | None:
    """Return how long a collective takes, on a line between two samples.

    Args:
      samples: of a machine.
      collective, transport, ranks: as of a :class:`Sample`.
      size: bytes of a rank's operand.
      devices: of a host that do the same at once, in groups like this one.

    Returns:
      None for bytes or devices beyond what was measured, or for other ranks.

    >>> at = [Sample("permute", "nccl", 2, 2, n, n / 1e9) for n in (100, 300)]
    >>> measured_seconds(at, "permute", "nccl", 2, 200, devices=2)
    2e-07
    >>> measured_seconds(at, "permute", "nccl", 2, 400, devices=2)
    """
    asked = collective, transport, ranks
    known = {
        each.bytes: each.seconds
        for each in samples
        if (each.collective, each.transport, each.ranks) == asked
        and each.devices >= devices
    }
    below = max((each for each in known if each <= size), default=None)
    above = min((each for each in known if each >= size), default=None)
    if below is None or above is None:
        return None
    part = (size - below) / (above - below) if above > below else 0.0
    return known[below] + part * (known[above] - known[below])


def written(avals: Iterable[Any]) -> str:
    """Write operands as a flight record does."""
    return ", ".join(f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in avals)


def bytes_of(avals: Iterable[Any]) -> int:
    """Return the bytes of operands."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in avals)
