"""Rank r holds chunk r from the front and chunk r from the back of the sequence."""

import numpy as np

from jaxcomm.attention.schedules.block import Block, Blocks
from jaxcomm.attention.schedules.schedule import Schedule


class Zigzag(Schedule):
    """One slice from the front half and its mirror image from the back half.

    Under a causal mask every rank does the same work in every hop, and no hop but the
    first needs a mask inside a tile. The local length may be odd: then the front slice
    is one token longer than the back slice.

    Source: Zhu, ring-flash-attention, zigzag variant, 2024; used by Llama 3.

    >>> Zigzag().positions(1, 4, 4)
    array([ 2,  3, 12, 13], dtype=int32)
    """

    name = "zigzag"

    def segments(self, length):
        return (length - length // 2, length // 2)

    def positions(self, rank, size, length):
        front, back = self.segments(length)
        token = self.tokens(rank, length)
        in_front = (token < front).astype(np.int32)
        # Sums instead of np.where, which a traced rank does not pass through.
        start = size * front + (size - 1 - rank) * back - front
        return token + in_front * (rank * front) + (1 - in_front) * start

    def blocks(self, length):
        front, _ = self.segments(length)
        whole = (0, length)
        return Blocks(
            same=Block(whole, whole, right=0),
            earlier=Block(whole, (0, front)),
            later=Block((front, length), whole),
        )
