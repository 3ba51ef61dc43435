"""What a kernel is given: a rank's queries, one block of keys, and their scores."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.run import Run
from jaxcomm.attention.mask import Coordinates, Mask
from jaxcomm.attention.schedules.block import Block

_NOWHERE = Coordinates(None)


@dataclasses.dataclass(frozen=True)
class Hop:
    """Attention of a rank's queries over one block of keys.

    The score of a query and a key is ``cap(scale * query . key + bias - slope * abs(
    distance))``. A key that the mask hides has weight 0. A hop is a pytree of arrays.

    Attributes:
      scale: factor on the scores.
      mask: which keys a query sees, by positions.
      query: (B, T, N, D) floating.
      key: (B, S, K, D) of the same dtype; K divides N.
      value: (B, S, K, V) of the same dtype.
      queries: positions int32 (T,), or (B, T) if sequences differ; and segment ids
        int32 (B, T), or None.
      keys: the same of S keys.
      bias: (B, N, T, S) floating, or None. All dimensions but the last may be 1. A
        number below -50,000 hides its key.
      slopes: (B, N) in the dtype of sums, of ALiBi, or None.
      seeds: uint32 (B, N) of dropout, or None: see ``scores.random_bits``.
      soft_cap: bound on the scores, by ``cap * tanh(score / cap)``, or None.
      dropout_rate: share of the weights that dropout leaves out.
      has_residual: whether the log-sum-exp may have a gradient.
      query_segments: lengths of the parts that a tile should not straddle.
      key_segments: the same of the keys.
      blocks: for kernels that set ``by_blocks``: the queries see one of these. Empty if
        no such kernel may compute it.
      block: int32 scalar, which of the blocks it is. If None, the only one.
      runs: for kernels that set ``by_runs``: all queries, in their order, and the keys
        that they see. Empty if they are no runs, or no such kernel may compute it.
      follows_one: whether what it is merged with, or added to, is of one hop. Of a
        kernel that rounds to the query's dtype, it has that precision.
      is_last: whether nothing is merged with its results, or added to its gradient of
        queries: they may be rounded to the query's dtype.
      kernels: the :class:`Kernel` objects that may compute it. The first that can does.
      refused: names of other kernels, and why they cannot.
      platform: ``"cpu"``, ``"cuda"``, ``"rocm"``, ``"tpu"`` or ``"other"``. None where
        it is not known yet: programs are traced before they are lowered for a platform.
      automatic_axes: mesh axes of several devices that ``shard_map`` leaves to XLA.
        XLA cannot split a custom call over them.
      is_backward: whether gradients are computed.
    """

    scale: float
    mask: Mask
    query: Any = None
    key: Any = None
    value: Any = None
    queries: Coordinates = _NOWHERE
    keys: Coordinates = _NOWHERE
    bias: Any = None
    slopes: Any = None
    seeds: Any = None
    soft_cap: float | None = None
    dropout_rate: float = 0.0
    has_residual: bool = False
    query_segments: tuple[int, ...] = ()
    key_segments: tuple[int, ...] = ()
    blocks: tuple[Block, ...] = ()
    block: Any = None
    runs: tuple[Run, ...] = ()
    follows_one: bool = False
    is_last: bool = False
    kernels: tuple[Any, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    platform: str | None = None
    automatic_axes: tuple[str, ...] = ()
    is_backward: bool = False

    def replace(self, **changed: Any) -> "Hop":
        """Return a hop with other attributes."""
        return dataclasses.replace(self, **changed)

    @property
    def has_shared_tokens(self) -> bool:
        """Whether all sequences of the batch have the same tokens."""
        return self.queries.is_shared and self.keys.is_shared

    @property
    def sum_dtype(self):
        """The dtype of sums."""
        return sum_dtype(self.query.dtype)

    def seen(self) -> jax.Array:
        """Return which keys each query sees, bool (B or 1, T, S), without the bias."""

        def spread(tokens, axis):
            return Coordinates(
                *(
                    None if x is None else jnp.expand_dims(jnp.atleast_2d(x), axis)
                    for x in tokens
                )
            )

        return self.mask.allowed(spread(self.queries, 2), spread(self.keys, 1))


_ARRAYS = ("query", "key", "value", "queries", "keys", "bias", "slopes", "seeds")
_ARRAYS += ("block",)
jax.tree_util.register_dataclass(
    Hop,
    _ARRAYS,
    [field.name for field in dataclasses.fields(Hop) if field.name not in _ARRAYS],
)


class Saved(NamedTuple):
    """What the backward pass knows of a rank's queries, over all keys of all hops.

    Attributes:
      grad_out: (B, T, N, V), in the dtype of the query.
      out: the same shape and dtype.
      lse: (B, T, N), in the dtype of sums. A kernel is given +inf for rows that see no
        key, so that ``exp(score - lse)`` is 0.
      delta: (B, T, N), sum of ``grad_out * out`` over V, less the gradient of ``lse``.
        A kernel that computes the sum itself is right if ``hop.has_residual`` is False.
    """

    grad_out: Any
    out: Any
    lse: Any
    delta: Any

    def with_delta(self, hop: Hop) -> "Saved":
        """Return it with ``delta`` computed anew, if it can be.

        In a branch that needs it: what a branch is given is computed whichever is
        taken.
        """
        if hop.has_residual:
            return self
        grad_out, out = (x.astype(self.lse.dtype) for x in (self.grad_out, self.out))
        return self._replace(delta=(grad_out * out).sum(-1))


class Grads(NamedTuple):
    """The gradients by a hop's arrays, in their shapes; None of what was not given."""

    query: Any
    key: Any
    value: Any
    bias: Any = None
    slopes: Any = None


def sum_dtype(dtype):
    """Return the dtype of sums: float64 for float64 inputs, else float32.

    Not ``jnp.promote_types``, which strict promotion forbids.
    """
    return jnp.dtype("float64" if jnp.finfo(dtype).bits == 64 else "float32")
