"""What all-gather and halo share: collect the keys first, then attend once."""

import abc
from typing import Any

import jax.numpy as jnp

from jaxcomm.attention.kernels import gpus
from jaxcomm.attention.kernels.hop import Grads, Hop
from jaxcomm.attention.kernels.primitive import hop_backward, hop_forward
from jaxcomm.attention.kernels.run import Run
from jaxcomm.attention.kernels.selection import narrowed
from jaxcomm.attention.mask import PADDING, Coordinates
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
    def runs(self, call: Call, inputs: Inputs) -> tuple[Run, ...]:
        """Return the queries' runs, if the gathered keys are in their natural order."""

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
        queries = coordinates_of(layouts[0], call.rank(), 1, inputs.query_ids)
        of_keys = Coordinates(self.positions(call, inputs), keys.segment_ids)
        runs = self.runs(call, inputs) if may_have_runs(call, inputs) else ()
        if runs and layouts[1].length != call.size * layouts[1].local_length:
            batch = inputs.query.shape[0]
            queries = _with_padding(call, queries, batch)
            of_keys = _with_padding(call, of_keys, batch)
        hop = call.hop.replace(
            query=inputs.query,
            key=keys.key,
            value=keys.value,
            queries=queries,
            keys=of_keys,
            runs=runs,
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


def may_have_runs(call: Call, inputs: Inputs) -> bool:
    """Say whether a kernel may go by runs of queries and keys."""
    return gpus.are_of_mesh() and call.is_self and inputs.bias is None


def _with_padding(call: Call, tokens: Coordinates, batch: int) -> Coordinates:
    """Return tokens with segment ids that tell padding, which has no others."""
    if tokens.segment_ids is not None:
        return tokens
    ids = jnp.where(tokens.positions < call.mask.key_length, 0, PADDING)
    return tokens._replace(segment_ids=jnp.broadcast_to(ids, (batch, ids.shape[-1])))
