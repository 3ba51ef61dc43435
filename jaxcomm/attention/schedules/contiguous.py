"""Rank r holds the r-th slice of the sequence."""

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
        return rank * length + self.tokens(rank, length)

    def blocks(self, length):
        whole = (0, length)
        return Blocks(
            same=Block(whole, whole, right=0),
            earlier=Block(whole, whole),
            later=Block((0, 0), (0, 0)),
        )
