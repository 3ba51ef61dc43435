"""What a kernel is, and what it is given: a rank's queries and one block of keys."""

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.scores import Scores
from jaxcomm.attention.pairs import Pairs


@dataclasses.dataclass(frozen=True)
class Hop:
    """Attention of a rank's queries over one block of keys.

    ``scores`` say what becomes of ``query . key``, and ``pairs`` which of them count: a
    key that a query does not see has weight 0. A hop is a pytree of arrays.

    Attributes:
      scores: ``scale``; and ``bias``, ``slopes`` of ALiBi, ``seeds`` and
        ``dropout_rate``, and ``soft_cap``, which a kernel names in its ``options``. See
        ``Scores``.
      pairs: which keys each query sees.
      query: (B, T, N, D) floating.
      key: (B, S, K, D) of the same dtype; K divides N.
      value: (B, S, K, V) of the same dtype.
      has_residual: whether the log-sum-exp may have a gradient.
      kernels: the :class:`Kernel` objects that may compute it. The first that can does.
      refused: names of other kernels, and why they cannot.
      platform: ``"cpu"``, ``"cuda"``, ``"rocm"``, ``"tpu"`` or ``"other"``. None where
        it is not known yet: programs are traced before they are lowered for a platform.
      automatic_axes: mesh axes of several devices that ``shard_map`` leaves to XLA.
        XLA cannot split a custom call over them.
      is_backward: whether gradients are computed.
    """

    scores: Scores
    pairs: Pairs
    query: Any = None
    key: Any = None
    value: Any = None
    has_residual: bool = False
    kernels: tuple[Any, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    platform: str | None = None
    automatic_axes: tuple[str, ...] = ()
    is_backward: bool = False

    def replace(self, **changed: Any) -> "Hop":
        """Return a hop with other attributes."""
        return dataclasses.replace(self, **changed)

    def with_pairs(self, **changed: Any) -> "Hop":
        """Return a hop with other attributes of its pairs."""
        return self.replace(pairs=dataclasses.replace(self.pairs, **changed))

    def packed(
        self, starts: Sequence[tuple], longest: tuple[int, int] | None = None
    ) -> "Hop":
        """Return a hop whose runs know where their documents begin."""
        runs = (
            dataclasses.replace(run, starts=each, longest=longest)
            for run, each in zip(self.pairs.runs, starts, strict=True)
        )
        return self.with_pairs(runs=tuple(runs))

    @property
    def sum_dtype(self):
        """The dtype of sums."""
        return sum_dtype(self.query.dtype)


_ARRAYS = ["query", "key", "value", "pairs", "scores"]
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


def finite(lse):
    """Return log-sum-exps with the least finite number where a row saw no key.

    For what is kept: ``jax_debug_infs`` looks at it.
    """
    return jnp.maximum(lse, jnp.finfo(lse.dtype).min)


def is_empty(lse):
    """Say which rows saw no key, by their log-sum-exp, :func:`finite` or not."""
    return lse <= jnp.finfo(lse.dtype).min


def merge(*parts):
    """Merge partial attentions of the same queries, without NaN for empty rows.

    With m the largest lse, taken as 0 where all are -inf, and w_i = exp(lse_i - m): lse
    = m + log(sum of w_i) and out = sum of w_i out_i / sum of w_i. Forms built from a
    sigmoid of the difference give NaN where both sides are -inf.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.

    Args:
      parts: pairs (out, lse). Out: (..., D) float32, normalized outputs over each set
        of keys. Lse: (...) float32, logarithms of the sums of exp(score); -inf where a
        row saw no key.

    Returns:
      (out, lse) of the same shapes; rows that saw no key give 0 and -inf.

    >>> lse = jnp.array([0.0])
    >>> merge((jnp.array([[1.0]]), lse), (jnp.array([[3.0]]), lse))
    (Array([[2.]], dtype=float32), Array([0.6931472], dtype=float32))
    """
    outs, lses = zip(*parts, strict=True)
    largest = functools.reduce(jnp.maximum, lses)
    top = jnp.where(jnp.isneginf(largest), 0, largest)
    weights = [jnp.exp(lse - top) for lse in lses]
    total = at_least_half(functools.reduce(jnp.add, weights))
    share = 1 / total
    # On a GPU XLA would compute them anew for every element of out.
    shares = jnp.stack([weight * share for weight in weights])
    shares = jax.lax.optimization_barrier(shares)[..., None]
    terms = [x * out for x, out in zip(shares, outs, strict=True)]
    return functools.reduce(jnp.add, terms), largest + jnp.log(total)


def at_least_half(total):
    """Return sums of weights, of which the largest is 1, with 0.5 where there is none.

    So that neither an inverse nor a logarithm has a derivative that is not finite.
    """
    return jnp.maximum(total, 0.5)


# What a kernel says it honours, and what messages call it.
OPTIONS = {
    "segment_ids": "segment ids or lengths",
    "ranges": "a mask of ranges",
    "bias": "a bias or mask",
    "alibi_slopes": "alibi_slopes",
    "dropout": "dropout",
    "logits_soft_cap": "logits_soft_cap",
}


class Kernel(abc.ABC):
    """What computes the hops of every strategy: pass one as ``implementation=``.

    A program is compiled for a kernel, so a kernel is hashable, and equal to another
    that computes the same. Make a subclass a frozen dataclass of Python values.

    Attributes:
      name: an identifier, which ``kernels_of`` returns.
      options: what it honours beside the mask: names of ``"segment_ids"``,
        ``"ranges"``, ``"bias"``, ``"alibi_slopes"``, ``"dropout"``,
        ``"logits_soft_cap"``. A call with another option is refused.
      by_blocks: whether it has no masks of positions, and computes one of
        ``hop.pairs.blocks``. A call whose hops are no such blocks is refused.
      by_runs: whether it also computes ``hop.pairs.runs``, where there are no blocks.
      rounds: whether its output is rounded to the dtype of the queries. The sums of
        ``grad_out * out`` are then of the rounded output.
    """

    name: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()
    by_blocks: ClassVar[bool] = False
    by_runs: ClassVar[bool] = False
    rounds: ClassVar[bool] = False

    @abc.abstractmethod
    def why_not(self, hop: Hop) -> str | None:
        """Say why it cannot compute a hop, as words after "but"; None if it can.

        It is asked when a call is traced, where ``hop.platform`` is None, and again
        when the program is lowered for a platform. Arrays have a shape and a dtype
        alone. What it refuses when traced it refuses for every platform.
        """

    @abc.abstractmethod
    def forward(self, hop: Hop) -> tuple[Any, Any]:
        """Attend over the keys of the hop.

        Returns:
          (out, lse): (B, T, N, V) floating, divided by the sum of the weights, and (B,
          T, N) in ``hop.sum_dtype``, the logarithm of the sum of ``exp(score)``. Rows
          that see no key give 0 and -inf. Dropout thins the weights of ``out`` alone.
        """

    @abc.abstractmethod
    def backward(self, hop: Hop, saved: Saved) -> Grads:
        """Return what the keys of the hop contribute to the gradients.

        The weight of a score is ``exp(score - saved.lse)``; the gradient of a score is
        ``weight * (grad_out . value - delta)``.

        Returns:
          Gradients in the shapes of query, key and value; and of bias and slopes, if
          they are given. Any floating dtype: jaxcomm sums them in ``hop.sum_dtype``.
        """

    def forward_onto(self, hop: Hop, merged: tuple[Any, Any]) -> tuple[Any, Any]:
        """Attend, and merge with what other keys gave; a kernel may do both at once.

        Args:
          hop: as in :meth:`forward`.
          merged: (out, lse) over other keys, in ``hop.sum_dtype``.
        """
        out, lse = self.forward(hop)
        return merge(merged, (out.astype(lse.dtype), lse))

    def backward_onto(self, hop: Hop, saved: Saved, total: Any) -> Grads:
        """Return the gradients, with that of the queries added to ``total``."""
        found = Grads(*self.backward(hop, saved))
        return found._replace(query=total + found.query.astype(total.dtype))
