"""Attention in float64 by numpy, with every option and all gradients by hand."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from jaxcomm.attention import Ranges


class Attention(NamedTuple):
    """Results in natural order; the gradients are None where none were asked for."""

    out: Any
    lse: Any
    grad_query: Any = None
    grad_key: Any = None
    grad_value: Any = None
    grad_bias: Any = None
    grad_slopes: Any = None
    grad_sinks: Any = None


@dataclasses.dataclass(frozen=True)
class Options:
    """What changes attention; arrays are of whole sequences in natural order.

    Attributes:
      is_causal, window, cap: as ``is_causal``, ``local_window_size``,
        ``logits_soft_cap`` of ring_attention.
      query_ids, key_ids: (B, T) and (B, S) segment ids.
      query_lengths, key_lengths: (B,).
      bias, mask: broadcast to (B, N, T, S); or a mask is ``Ranges``.
      slopes, sinks: (N,).
      kept: (B, N, T, S), what dropout multiplies the weights with.
    """

    is_causal: bool = False
    window: tuple[int, int] | None = None
    query_ids: Any = None
    key_ids: Any = None
    query_lengths: Any = None
    key_lengths: Any = None
    bias: Any = None
    mask: Any = None
    slopes: Any = None
    sinks: Any = None
    cap: float | None = None
    kept: Any = None

    def allowed(self, batch, queries, keys):
        """Return bool (B, 1 or N, T, S)."""
        row, column = np.ogrid[:queries, :keys]
        seen = np.ones((batch, 1, queries, keys), bool)
        if self.is_causal:
            seen &= row >= column
        if self.window is not None:
            left, right = self.window
            seen &= (row - column <= left) & (column - row <= right)
        if self.query_ids is not None:
            ids = np.asarray(self.query_ids)[:, None, :, None]
            key_ids = self.query_ids if self.key_ids is None else self.key_ids
            seen &= (ids == np.asarray(key_ids)[:, None, None]) & (ids >= 0)
        for lengths, at in ((self.query_lengths, row), (self.key_lengths, column)):
            if lengths is not None:
                seen &= at < np.reshape(lengths, (-1, 1, 1, 1))
        if isinstance(self.mask, Ranges):
            of_queries, of_keys = (
                pair and [np.asarray(x)[:, None] for x in pair]
                for pair in (self.mask.keys, self.mask.queries)
            )
            if of_queries:
                first, end = (x[..., None] for x in of_queries)
                seen = seen & (column >= first) & (column < end)
            if of_keys:
                first, end = (x[..., None, :] for x in of_keys)
                seen = seen & (row >= first) & (row < end)
            return seen
        return seen if self.mask is None else seen & np.asarray(self.mask)


def attention(query, key, value, options, grads=None):
    query, key, value = map(_heads_first, (query, key, value))
    batch, heads, queries, depth = query.shape
    key_heads, keys = key.shape[1:3]
    key, value = (np.repeat(x, heads // key_heads, 1) for x in (key, value))
    scale = depth**-0.5

    def of_heads(x, absent):
        x = np.full(heads, absent) if x is None else x
        return np.asarray(x, np.float64)[:, None, None]

    row, column = np.ogrid[:queries, :keys]
    distance = abs(row - column)
    scores = scale * query @ key.mT - of_heads(options.slopes, 0.0) * distance
    if options.bias is not None:
        scores = scores + np.asarray(options.bias, np.float64)
    derivative = 1.0
    if options.cap is not None:
        bounded = np.tanh(scores / options.cap)
        scores, derivative = options.cap * bounded, 1 - bounded**2
    scores = np.where(options.allowed(batch, queries, keys), scores, -np.inf)
    sinks = of_heads(options.sinks, -np.inf)
    top = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), sinks)
    top = np.where(np.isneginf(top), 0, top)
    weights, of_sink = np.exp(scores - top), np.exp(sinks - top)
    total = weights.sum(-1, keepdims=True) + of_sink
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    total = np.where(total, total, 1)
    weights /= total
    kept = 1.0 if options.kept is None else np.asarray(options.kept)
    out = (weights * kept) @ value
    if grads is None:
        return Attention(out.swapaxes(1, 2), lse.swapaxes(1, 2))
    grad_out, grad_lse = map(_heads_first, grads)
    delta = (grad_out * out).sum(-1) - grad_lse
    grad_scores = kept * (grad_out @ value.mT) - delta[..., None]
    grad_scores *= weights * derivative

    def of_key_heads(x):
        return x.reshape(batch, key_heads, heads // key_heads, *x.shape[2:]).sum(2)

    by_tokens = (
        out,
        lse,
        scale * grad_scores @ key,
        of_key_heads(scale * grad_scores.mT @ query),
        of_key_heads((weights * kept).mT @ grad_out),
    )
    grad_bias = grad_slopes = grad_sinks = None
    if options.bias is not None:
        axes = tuple(i for i, n in enumerate(np.shape(options.bias)) if n == 1)
        grad_bias = grad_scores.sum(axes, keepdims=True)
    if options.slopes is not None:
        grad_slopes = -(grad_scores * distance).sum((0, 2, 3))
    if options.sinks is not None:
        grad_sinks = -((of_sink / total)[..., 0] * delta).sum((0, 2))
    return Attention(
        *(x.swapaxes(1, 2) for x in by_tokens), grad_bias, grad_slopes, grad_sinks
    )


def _heads_first(x):
    return np.asarray(x, np.float64).swapaxes(1, 2)


# Of kernels in bfloat16: the norm of the error, relative to that of the result. An
# output in bfloat16 and a ring in float32 give 2.5e-3 for every number of ranks;
# kernels round weights and gradients of scores as well. The residual is float32.
LIMITS = dict.fromkeys(Attention._fields, 1e-2) | {"out": 4e-3, "lse": 1e-4}


def assert_within_limits(found, expected):
    """Compare what was computed of an Attention by norms. NaN is beyond any limit."""
    beyond = {}
    for name, x, right in zip(Attention._fields, found, expected, strict=True):
        if x is None:
            continue
        x, right = np.asarray(x, np.float64), np.asarray(right, np.float64)
        is_empty = np.isneginf(right)
        assert (np.isneginf(x) == is_empty).all(), name
        x, right = (np.where(is_empty, 0, each) for each in (x, right))
        error, size = np.linalg.norm(x - right), np.linalg.norm(right)
        if not error <= LIMITS[name] * size:
            beyond[name] = error / size
    assert not beyond
