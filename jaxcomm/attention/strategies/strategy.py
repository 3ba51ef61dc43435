"""What a strategy is: what travels between the ranks, and nothing else."""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.cudnn_support import Fusion, fusion
from jaxcomm.attention.kernels.operands import Grads, HopConfig, Terms
from jaxcomm.attention.layout import Layout
from jaxcomm.attention.mask import Mask, Tokens
from jaxcomm.attention.problem import Problem


class Inputs(NamedTuple):
    """The arrays of one rank.

    Attributes:
      query: (B, T, N, D) floating.
      key: (B, S, K, D) of the same dtype.
      value: (B, S, K, V) of the same dtype.
      query_ids: int32 (B, T), segment ids of the queries, or None.
      key_ids: int32 (B, S), those of the keys, or None.
      terms: bias (B, N, T, size * S), with its last dimension in rank order; slopes and
        seeds.
      query_layout, key_layout: who holds which positions.
    """

    query: Any
    key: Any
    value: Any
    query_ids: Any
    key_ids: Any
    terms: Terms
    query_layout: Layout
    key_layout: Layout


@dataclasses.dataclass(frozen=True)
class Call:
    """What a call knows before it sees an array.

    Attributes:
      axis_name: the mesh axis, or tuple of axes, that splits the sequence.
      size: its size.
      mask: which keys a query sees.
      scale, soft_cap, dropout_rate, implementation, has_residual: see ``HopConfig``.
      lane, backend: what carries the bytes.
      strategy: what travels.
      bias_dtype: of the bias, if there is one.
      not_fused: an argument of the call that cuDNN cannot take, in words, or None.
    """

    axis_name: Any
    size: int
    mask: Mask
    scale: float
    strategy: "Strategy"
    soft_cap: float | None = None
    dropout_rate: float = 0.0
    implementation: str | None = None
    has_residual: bool = False
    lane: str | None = None
    backend: str | None = None
    bias_dtype: str | None = None
    not_fused: str | None = None

    @property
    def via(self) -> dict:
        """The arguments of a collective that say what carries it."""
        return {"lane": self.lane, "backend": self.backend}

    def rank(self):
        """Return the index of this rank."""
        return jax.lax.axis_index(self.axis_name)

    def fusion(self, inputs: Inputs, other: str | None = None) -> Fusion:
        """Say what cuDNN computes of hops with these inputs.

        Args:
          inputs: of a rank.
          other: what keeps cuDNN from it, in words, or None.
        """
        if self.has_residual and self.mask.left is not None:
            # Its backward pass would have larger heads, which no GPU has shown.
            other = other or "it is used without a window where return_residual=True"
        return fusion(
            self.implementation,
            *inputs[:3],
            layouts=(inputs.query_layout, inputs.key_layout),
            mask=self.mask,
            other=self.not_fused or other,
        )

    def hop(
        self,
        query_segments: tuple[int, ...],
        key_segments: tuple[int, ...],
        fusion: Fusion,
    ) -> HopConfig:
        """Return what is known of a hop.

        Args:
          query_segments, key_segments: parts that a tile should not straddle.
          fusion: what cuDNN computes of it.
        """
        return HopConfig(
            scale=self.scale,
            mask=self.mask,
            query_segments=query_segments,
            key_segments=key_segments,
            soft_cap=self.soft_cap,
            dropout_rate=self.dropout_rate,
            implementation=self.implementation,
            blocks=fusion.blocks,
            not_fused=fusion.reason,
            has_residual=self.has_residual,
        )


class Saved(NamedTuple):
    """What the backward pass knows of the whole attention of this rank's queries.

    Attributes:
      grad_out: (B, T, N, V), in the dtype of the query.
      out: the same shape and dtype.
      lse: (B, T, N), in the dtype of sums.
      delta: (B, T, N), sum of ``grad_out * out`` over V, less the gradient of ``lse``.
    """

    grad_out: Any
    out: Any
    lse: Any
    delta: Any


class Cost(NamedTuple):
    """What a strategy sends and holds, per rank.

    Attributes:
      sends: collectives of a forward pass that follow one another.
      forward_bytes, backward_bytes: sent.
      memory: bytes of keys and values held at once, forward.
      overlaps: whether it computes while it sends.
      width: how many ranks share the work of their queries equally.
    """

    sends: int
    forward_bytes: float
    backward_bytes: float
    memory: float
    overlaps: bool = False
    width: int = 1


class Strategy(abc.ABC):
    """How the keys and values of all ranks reach the queries of each.

    A subclass is a frozen dataclass of Python values. It computes with ``hop_forward``
    and ``hop_backward``, which sum in float32; it sends gradients in float32 where they
    are still to be summed. Sinks, casts and ``jax.custom_vjp`` are not its business.
    """

    name: ClassVar[str]

    def why_not(self, problem: Problem) -> str | None:
        """Say why it cannot compute this, as words after "but"; None if it can."""
        return None

    def cost(self, problem: Problem) -> Cost:
        """Return what it sends and holds; for ``plan`` and ``"auto"``."""
        raise NotImplementedError(f"The strategy {self.name!r} does not say its cost.")

    @abc.abstractmethod
    def forward(self, call: Call, inputs: Inputs) -> tuple[tuple[Any, Any], Any]:
        """Attend.

        Returns:
          (out, lse), kept: float32 (B, T, N, V) and (B, T, N), or float64; and a pytree
          for :meth:`backward`.
        """

    @abc.abstractmethod
    def backward(self, call: Call, kept: Any, saved: Saved) -> Grads:
        """Return the gradients, shaped as the inputs, in the dtype of sums."""


def tokens_of(layout: Layout, rank, width: int, ids=None) -> Tokens:
    """Return the tokens of ``width`` ranks from ``rank * width`` on, in rank order."""
    if width == 1:
        return Tokens(layout.positions_of(rank), ids)
    held = [layout.positions_of(rank * width + i) for i in range(width)]
    return Tokens(jnp.concatenate([jnp.asarray(x) for x in held], -1), ids)


def columns_of(terms: Terms, start, count: int) -> Terms:
    """Return the terms with the columns of a block of keys."""
    if terms.bias is None:
        return terms
    columns = jax.lax.dynamic_slice_in_dim(terms.bias, start, count, axis=3)
    return terms._replace(bias=columns)
