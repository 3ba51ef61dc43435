"""One collective of a program, as planning sees it.

Its bytes are those of the closed forms of the algorithms. Source: R. Thakur, R.
Rabenseifner and W. Gropp, "Optimization of Collective Communication Operations in
MPICH", IJHPCA 19(1):49-66, 2005, and the bus bandwidth of NVIDIA's nccl-tests
(doc/PERFORMANCE.md).
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from jaxcomm.communicator.replica_groups import IndexGroups

# Ranks send to all others of their group. By other collectives they send to neighbors.
SENDS_TO_ALL = {"all_to_all", "ragged_all_to_all", "gather", "scatter"}


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
      travelling_bytes: of those operands that travel.
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
    travelling_bytes: int
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


def sent_bytes(collective: str, ranks: int, operand_bytes: int) -> float:
    """Return what the busiest rank sends, or receives if that is more.

    Of ``ragged_all_to_all`` no sizes are known: as if a rank sent all of its rows, the
    same number to each.

    Args:
      collective: of the C++ planner, ``"all_reduce"``.
      ranks: of the group.
      operand_bytes: handed in by a rank, of the operands that travel.

    >>> sent_bytes("all_reduce", 4, 100)
    150.0
    >>> sent_bytes("all_gather", 4, 100)  # of a result of 400 bytes
    300
    """
    others, size = ranks - 1, operand_bytes
    if collective == "all_reduce":
        return 2 * others * size / ranks
    if collective in ("reduce_scatter", "all_to_all", "ragged_all_to_all", "scatter"):
        return others * size / ranks
    # check_positions, check_step: what each rank says, all others read.
    checks = "check_positions", "check_step"
    if collective in ("all_gather", "gather", "scan", *checks):
        return others * size
    if collective in ("broadcast", "reduce", "permute"):
        return size if others else 0
    if collective == "barrier":
        return 0
    raise ValueError(f"plan: there is no closed form of {collective!r}")
