"""Ring: each rank keeps its queries while keys and values travel from rank to rank."""

import dataclasses

from jaxcomm.attention.strategies.hops import distances
from jaxcomm.attention.strategies.loop import Loop
from jaxcomm.attention.strategies.strategy import Cost
from jaxcomm.attention.strategies.walk import Walk


@dataclasses.dataclass(frozen=True)
class Ring(Walk):
    """One hop for each rank whose keys some rank sees.

    With h hops there are h - 1 sends forward. Backward there are h - 1 more, the other
    way round, and as many of the float32 gradients. Every send has a block to be
    computed meanwhile. The backward pass saves the last received block, not the rank's
    own: it walks the ring in reverse and ends at home. Sums are float32 throughout, so
    the error does not grow with the number of ranks.

    Source: Liu et al., Ring Attention with Blockwise Transformers, 2023.

    Attributes:
      width: how many neighbouring ranks of the axis hold one member's tokens. More than
        one below Ulysses, which has exchanged tokens and heads among them.
    """

    width: int = 1
    name = "ring"

    def cost(self, problem):
        sends = len(distances(problem, problem.mask, self.width)) - 1
        block = self.width * problem.block_bytes
        grads = self.width * problem.key_grad_bytes
        return Cost(
            sends,
            sends * block,
            sends * (block + grads),
            (1 + bool(sends)) * self.width * problem.key_bytes,
            overlaps=True,
            steps=2 * sends + 1,
            hops=sends,
        )

    def loop(self, call, inputs):
        return Loop.around(self.width, call, inputs)
