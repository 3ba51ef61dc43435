"""Rank r holds every size-th token, starting at r."""

from jaxcomm.attention.schedules.block import Block, Blocks
from jaxcomm.attention.schedules.schedule import Schedule


class Striped(Schedule):
    """Tokens dealt one by one, like cards.

    Under a causal mask every hop is a causal or strictly causal square, so ranks are
    balanced up to one diagonal, but every tile on the diagonal of every hop needs a
    mask; zigzag needs it in the first hop only.

    Source: Brandon et al., Striped Attention, 2023.

    >>> Striped().positions(1, 4, 4)
    array([ 1,  5,  9, 13], dtype=int32)
    """

    name = "striped"

    def positions(self, rank, size, length):
        return rank + size * self.tokens(rank, length)

    def blocks(self, length):
        causal = Block((0, length), (0, length), right=0)
        # Strictly causal: causal if the first query and the last key are left out.
        strictly = Block((1, length), (0, length - 1), right=0)
        return Blocks(same=causal, earlier=causal, later=strictly)
