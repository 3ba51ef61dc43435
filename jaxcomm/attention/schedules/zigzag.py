"""Rank r holds chunk r from the front and chunk r from the back of the sequence."""

import jax.numpy as jnp
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
        start = size * front + (size - 1 - rank) * back - front
        if isinstance(token, np.ndarray):
            return token + np.where(token < front, rank * front, start).astype(np.int32)
        # Two ranges side by side: XLA would make a choice for each token anew.
        first, second = token[:front] + rank * front, token[front:] + start
        return jnp.concatenate([first, second])

    def blocks(self, length):
        front, _ = self.segments(length)
        whole = (0, length)
        return Blocks(
            same=Block(whole, whole, right=0),
            earlier=Block(whole, (0, front)),
            later=Block((front, length), whole),
        )
