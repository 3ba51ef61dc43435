"""What a hop takes: arrays as one pytree, and what is known when it is traced."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxcomm.attention.mask import Mask, Tokens
from jaxcomm.attention.schedules.block import Blocks


class Terms(NamedTuple):
    """What changes the scores beside the mask; each may be None.

    Attributes:
      bias: (B, N, T, S) floating, added to the scores. All dimensions but the last may
        be 1.
      slopes: (B, N) floating, of ALiBi: ``-slope * abs(distance)`` is added.
      seeds: (B, N) uint32. The weights that dropout leaves out follow from a seed and
        the positions of query and key.
    """

    bias: Any = None
    slopes: Any = None
    seeds: Any = None


class Operands(NamedTuple):
    """The arrays of one hop.

    Attributes:
      query: (B, T, N, D) floating.
      key: (B, S, K, D) floating; K divides N.
      value: (B, S, K, V) floating.
      queries, keys: their tokens.
      terms: what is added to the scores.
    """

    query: Any
    key: Any
    value: Any
    queries: Tokens
    keys: Tokens
    terms: Terms = Terms()

    @property
    def has_shared_tokens(self) -> bool:
        """Whether all sequences of the batch have the same tokens."""
        return self.queries.is_shared and self.keys.is_shared


class Grads(NamedTuple):
    """The gradients of a hop, in the dtype of sums; None of what was not given."""

    query: Any
    key: Any
    value: Any
    bias: Any = None
    slopes: Any = None


@dataclasses.dataclass(frozen=True)
class HopConfig:
    """What is the same for every hop of a call.

    Attributes:
      scale: factor on the scores.
      mask: which keys a query sees.
      query_segments: parts of the local queries that a tile should not straddle.
      key_segments: the same for the keys.
      soft_cap: bound on the scores, by ``cap * tanh(score / cap)``, before the mask.
      dropout_rate: share of the weights that dropout leaves out.
      implementation: ``"cudnn"`` if a program without it shall be refused.
      blocks: what a fused kernel computes of a hop. If None, there is none.
      not_fused: why there is none, in words.
      has_residual: whether the log-sum-exp may have a gradient.
    """

    scale: float
    mask: Mask
    query_segments: tuple[int, ...]
    key_segments: tuple[int, ...]
    soft_cap: float | None = None
    dropout_rate: float = 0.0
    implementation: str | None = None
    blocks: Blocks | None = None
    not_fused: str | None = None
    has_residual: bool = False


def sum_dtype(dtype):
    """Return the dtype of sums: float64 for float64 inputs, else float32.

    Not ``jnp.promote_types``, which strict promotion forbids.
    """
    return jnp.dtype("float64" if jnp.finfo(dtype).bits == 64 else "float32")
