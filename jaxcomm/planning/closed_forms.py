"""Steps and bytes of collectives, by the closed forms of the algorithms.

Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective
Communication Operations in MPICH", IJHPCA 19(1):49-66, 2005, and the bus bandwidth of
NVIDIA's nccl-tests (doc/PERFORMANCE.md). A collective of n ranks takes
``steps * latency + bytes / rate``.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Form:
    """What the busiest rank does.

    Attributes:
      steps: sends that follow one another.
      bytes: that it sends, or receives if that is more.
      only_moves: whether nothing is reduced.
      by_ring: whether NCCL runs it along rings; else it sends from rank to rank.
    """

    steps: float
    bytes: float
    only_moves: bool
    by_ring: bool


def form(collective: str, ranks: int, operand_bytes: float) -> Form:
    """Return the closed form of a collective.

    Args:
      collective: of the C++ planner, ``"all_reduce"``.
      ranks: of the group.
      operand_bytes: handed in by a rank.

    >>> form("all_reduce", 4, 100.0)
    Form(steps=6, bytes=150.0, only_moves=False, by_ring=True)
    >>> form("all_gather", 4, 100.0).bytes  # of a result of 400 bytes
    300.0
    """
    n, size = ranks, operand_bytes
    part = (n - 1) / n
    if collective == "all_reduce":
        return Form(2 * (n - 1), 2 * part * size, False, True)
    if collective == "reduce_scatter":
        return Form(n - 1, part * size, False, True)
    # What each says of its positions, all others read.
    if collective in ("all_gather", "check_positions"):
        return Form(n - 1, (n - 1) * size, True, True)
    if collective in ("broadcast", "reduce"):
        return Form(n - 1, size, collective == "broadcast", True)
    if collective in ("all_to_all", "ragged_all_to_all", "scatter"):
        return Form(n - 1, part * size, True, False)
    if collective == "gather":
        return Form(n - 1, (n - 1) * size, True, False)
    if collective == "permute":
        return Form(1, size, True, False)
    if collective == "scan":
        return Form(math.ceil(math.log2(n)), (n - 1) * size, False, False)
    if collective == "barrier":
        return Form(math.ceil(math.log2(n)), 0, False, True)
    raise ValueError(f"plan: there is no closed form of {collective!r}")


def result_bytes(collective: str, ranks: int, operand_bytes: float) -> float:
    """Return the bytes of a rank's result.

    >>> result_bytes("all_gather", 4, 100.0), result_bytes("psum", 4, 100.0)
    (400.0, 100.0)
    """
    if collective in ("all_gather", "gather"):
        return ranks * operand_bytes
    if collective in ("reduce_scatter", "scatter"):
        return operand_bytes / ranks
    return operand_bytes


def touched_bytes(collective: str, ranks: int, operand_bytes: float) -> float:
    """Return the bytes that all ranks read and write where they share memory.

    >>> touched_bytes("all_gather", 4, 100.0)
    2000.0
    """
    n, size = ranks, operand_bytes
    if collective == "barrier":
        return 0
    # Of a gather, the root alone is written.
    writers = 1 if collective == "gather" else n
    written = writers * result_bytes(collective, n, size)
    read = size if collective in ("broadcast", "scatter") else n * size
    return read + written
