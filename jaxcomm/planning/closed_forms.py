"""Bytes of collectives, by the closed forms of the algorithms.

Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective
Communication Operations in MPICH", IJHPCA 19(1):49-66, 2005, and the bus bandwidth of
NVIDIA's nccl-tests (doc/PERFORMANCE.md).
"""

# Ranks send to all others of their group. By other collectives they send to neighbors.
SENDS_TO_ALL = {"all_to_all", "ragged_all_to_all", "gather", "scatter"}


def sent_bytes(collective: str, ranks: int, operand_bytes: int) -> float:
    """Return what the busiest rank sends, or receives if that is more.

    Args:
      collective: of the C++ planner, ``"all_reduce"``.
      ranks: of the group.
      operand_bytes: handed in by a rank.

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
    # check_positions: what each rank says of its positions, all others read.
    if collective in ("all_gather", "gather", "scan", "check_positions"):
        return others * size
    if collective in ("broadcast", "reduce", "permute"):
        return size if others else 0
    if collective == "barrier":
        return 0
    raise ValueError(f"plan: there is no closed form of {collective!r}")
