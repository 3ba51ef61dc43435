"""Rank r holds the r-th slice of the sequence."""

import numpy as np

from jaxcomm.attention.schedules.block import Block, Blocks
from jaxcomm.attention.schedules.schedule import Schedule


class Contiguous(Schedule):
    """One unbroken slice per rank.

    No reordering is needed and a sliding window reaches only the nearest ranks. Under a
    causal mask the last rank computes in every hop and the first in one only, so the
    ring takes about twice as long as with a balanced schedule.

    Source: Liu et al., Ring Attention with Blockwise Transformers, 2023.

    >>> Contiguous().positions(1, 4, 4)
    array([4, 5, 6, 7], dtype=int32)
    """

    name = "contiguous"

    def positions(self, rank, size, length):
        return rank * length + np.arange(length, dtype=np.int32)

    def blocks(self, length):
        whole = (0, length)
        return Blocks(
            same=Block(whole, whole, is_causal=True),
            earlier=Block(whole, whole),
            later=Block((0, 0), (0, 0)),
        )
