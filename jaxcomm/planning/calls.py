"""One collective of a program, as planning sees it."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from jaxcomm.communicator.replica_groups import IndexGroups


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
    """

    call: TracedCall
    times: int
    transport: str
    domains: int
    sent_bytes: float


def written(avals: Iterable[Any]) -> str:
    """Write operands as a flight record does."""
    return ", ".join(f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in avals)


def bytes_of(avals: Iterable[Any]) -> int:
    """Return the bytes of operands."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in avals)
