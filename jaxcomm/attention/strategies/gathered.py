"""What all-gather and halo share: collect the keys first, then attend once."""

import abc
from typing import Any

from jaxcomm.attention.kernels.hop import Grads, Hop
from jaxcomm.attention.kernels.primitive import hop_backward, hop_forward
from jaxcomm.attention.kernels.selection import narrowed
from jaxcomm.attention.mask import Coordinates
from jaxcomm.attention.strategies.strategy import (
    Call,
    Inputs,
    Keys,
    Strategy,
    coordinates_of,
)
from jaxcomm.attention.visibility import blocks_of


class Gathered(Strategy):
    """Attention over collected keys and values, in one hop.

    The backward pass collects anew: what is kept is no larger than the inputs.
    """

    @abc.abstractmethod
    def gather(self, call: Call, inputs: Inputs, keys: Keys) -> Keys:
        """Return all keys that the queries of this rank may see."""

    @abc.abstractmethod
    def positions(self, call: Call, inputs: Inputs):
        """Return the position of each gathered key, int32."""

    @abc.abstractmethod
    def segments(self, call: Call, inputs: Inputs) -> tuple[int, ...]:
        """Return the parts of the gathered keys that a tile should not straddle."""

    @abc.abstractmethod
    def scatter(self, call: Call, inputs: Inputs, grads) -> tuple[Any, Any]:
        """Sum the gradients of gathered keys and values into those of each rank."""

    @abc.abstractmethod
    def columns(self, call: Call, inputs: Inputs, bias):
        """Return the columns of the bias of the gathered keys."""

    @abc.abstractmethod
    def add_columns(self, call: Call, inputs: Inputs, grad_bias):
        """Return the gradient of the whole bias from that of its columns."""

    def forward(self, call, inputs):
        return hop_forward(self._hop(call, inputs)), inputs

    def backward(self, call, kept, saved):
        found = hop_backward(self._hop(call, kept), saved)
        key, value = self.scatter(call, kept, (found.key, found.value))
        bias = found.bias
        if bias is not None:
            bias = self.add_columns(call, kept, bias)
        return Grads(found.query, key, value, bias, found.slopes)

    def _hop(self, call, inputs) -> Hop:
        own = Keys(inputs.key, inputs.value, inputs.key_ids)
        keys = self.gather(call, inputs, own)
        layouts, bias = (inputs.query_layout, inputs.key_layout), inputs.bias
        hop = call.hop.replace(
            query=inputs.query,
            key=keys.key,
            value=keys.value,
            queries=coordinates_of(layouts[0], call.rank(), 1, inputs.query_ids),
            keys=Coordinates(self.positions(call, inputs), keys.segment_ids),
            bias=None if bias is None else self.columns(call, inputs, bias),
            slopes=inputs.slopes,
            seeds=inputs.seeds,
            query_segments=layouts[0].segments,
            key_segments=self.segments(call, inputs),
        )
        blocks = f"the strategy {self.name!r} masks by positions"
        if call.mask.is_everything:
            blocks = blocks_of(*layouts, call.mask, keys.key.shape[1])
        return narrowed(hop, blocks if isinstance(blocks, str) else (blocks.same,))
