"""What all-gather and halo share: collect the keys first, then attend once."""

import abc
from typing import Any, NamedTuple

from jaxcomm.attention.kernels.operands import Grads, HopConfig, Operands
from jaxcomm.attention.kernels.primitive import hop_backward, hop_forward
from jaxcomm.attention.mask import Tokens
from jaxcomm.attention.strategies.strategy import Call, Inputs, Strategy, tokens_of


class Keys(NamedTuple):
    """Keys of several ranks, as the ring's block: key, value, segment ids or None."""

    key: Any
    value: Any
    segment_ids: Any


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
        operands, config = self._hop(call, inputs)
        return hop_forward(operands, config=config), inputs

    def backward(self, call, kept, saved):
        operands, config = self._hop(call, kept)
        found = hop_backward(
            operands, saved.grad_out, saved.lse, saved.delta, saved.out, config=config
        )
        key, value = self.scatter(call, kept, (found.key, found.value))
        bias = found.bias
        if bias is not None:
            bias = self.add_columns(call, kept, bias)
        return Grads(found.query, key, value, bias, found.slopes)

    def _hop(self, call, inputs) -> tuple[Operands, HopConfig]:
        own = Keys(inputs.key, inputs.value, inputs.key_ids)
        keys = self.gather(call, inputs, own)
        terms = inputs.terms
        if terms.bias is not None:
            terms = terms._replace(bias=self.columns(call, inputs, terms.bias))
        operands = Operands(
            inputs.query,
            keys.key,
            keys.value,
            tokens_of(inputs.query_layout, call.rank(), 1, inputs.query_ids),
            Tokens(self.positions(call, inputs), keys.segment_ids),
            terms,
        )
        segments = inputs.query_layout.segments, self.segments(call, inputs)
        return operands, call.hop(*segments, self._fusion(call, inputs, operands))

    def _fusion(self, call, inputs, operands):
        if not call.mask.is_everything:
            reason = f"the strategy {self.name!r} masks by positions"
            return call.fusion(inputs, reason)
        whole = inputs._replace(key=operands.key, value=operands.value)
        return call.fusion(whole)
