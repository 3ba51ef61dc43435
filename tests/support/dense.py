"""Attention in float64 by numpy, with every option and all gradients by hand."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np


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
      bias: broadcasts to (B, N, T, S).
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
    slopes: Any = None
    sinks: Any = None
    cap: float | None = None
    kept: Any = None

    def allowed(self, batch, queries, keys):
        """Return bool (B, T, S)."""
        row, column = np.ogrid[:queries, :keys]
        seen = np.ones((batch, queries, keys), bool)
        if self.is_causal:
            seen &= row >= column
        if self.window is not None:
            left, right = self.window
            seen &= (row - column <= left) & (column - row <= right)
        if self.query_ids is not None:
            ids = np.asarray(self.query_ids)[:, :, None]
            key_ids = np.asarray(
                self.query_ids if self.key_ids is None else self.key_ids
            )
            seen &= (ids == key_ids[:, None]) & (ids >= 0)
        if self.query_lengths is not None:
            seen &= row < np.asarray(self.query_lengths)[:, None, None]
        if self.key_lengths is not None:
            seen &= column < np.asarray(self.key_lengths)[:, None, None]
        return seen


def attention(query, key, value, options, grads=None, *, chunk=256):
    """Attend in float64, a chunk of queries at a time.

    Args:
      query, key, value: (B, T, N, D), (B, S, K, D), (B, S, K, V).
      options: what changes it.
      grads: (B, T, N, V) and (B, T, N), the gradients of out and lse.
      chunk: queries at a time.
    """
    # Heads before tokens: products of matrices, which BLAS makes.
    query, key, value = (_heads_first(x) for x in (query, key, value))
    batch, heads, queries, depth = query.shape
    keys, group = key.shape[2], heads // key.shape[1]
    key, value = (np.repeat(x, group, 1) for x in (key, value))
    scale = depth**-0.5
    seen = options.allowed(batch, queries, keys)
    bias = 0.0 if options.bias is None else np.asarray(options.bias, np.float64)
    full = (batch, heads, queries, keys)
    has_bias = options.bias is not None
    bias = np.broadcast_to(bias, full) if has_bias else None
    slopes = options.slopes
    if slopes is not None:
        slopes = np.asarray(slopes, np.float64)[:, None, None]
    row, column = np.ogrid[:queries, :keys]
    out, lse = np.zeros((*query.shape[:3], value.shape[3])), np.zeros(query.shape[:3])
    grad_query, grad_key, grad_value = map(np.zeros_like, (query, key, value))
    grad_bias = np.zeros(full) if has_bias else None
    grad_slopes = None if slopes is None else np.zeros(heads)
    grad_sinks = None if options.sinks is None else np.zeros(heads)
    for start in range(0, queries, chunk):
        rows = slice(start, start + chunk)
        last = start + chunk if options.is_causal else None
        at = (slice(None), slice(None), rows, slice(last))
        scores = scale * query[:, :, rows] @ key[:, :, :last].mT
        if bias is not None:
            scores += bias[at]
        distance = abs(row[rows] - column[:, :last])
        if slopes is not None:
            scores -= slopes * distance
        derivative = 1.0
        if options.cap is not None:
            bounded = np.tanh(scores / options.cap)
            scores, derivative = options.cap * bounded, 1 - bounded**2
        scores = np.where(seen[:, None, rows, :last], scores, -np.inf)
        top = scores.max(-1, keepdims=True, initial=-np.inf)
        if options.sinks is not None:
            sinks = np.asarray(options.sinks, np.float64)[:, None, None]
            top = np.maximum(top, sinks)
        top = np.where(np.isneginf(top), 0, top)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        if options.sinks is not None:
            of_sink = np.exp(sinks - top)
            total = total + of_sink
        with np.errstate(divide="ignore"):
            lse[:, :, rows] = (top + np.log(total))[..., 0]
        total = np.where(total, total, 1)
        weights /= total
        kept = 1.0 if options.kept is None else np.asarray(options.kept)[at]
        out[:, :, rows] = (weights * kept) @ value[:, :, :last]
        if grads is None:
            continue
        grad_out, grad_lse = (_heads_first(x)[:, :, rows] for x in grads)
        delta = (grad_out * out[:, :, rows]).sum(-1) - grad_lse
        grad_scores = kept * (grad_out @ value[:, :, :last].mT) - delta[..., None]
        grad_scores *= weights * derivative
        if grad_sinks is not None:
            grad_sinks -= ((of_sink / total)[..., 0] * delta).sum((0, 2))
        if grad_bias is not None:
            grad_bias[at] = grad_scores
        if grad_slopes is not None:
            grad_slopes -= (grad_scores * distance).sum((0, 2, 3))
        grad_query[:, :, rows] = scale * grad_scores @ key[:, :, :last]
        grad_key[:, :, :last] += scale * grad_scores.mT @ query[:, :, rows]
        grad_value[:, :, :last] += (weights * kept).mT @ grad_out
    if grads is None:
        return Attention(out.swapaxes(1, 2), lse.swapaxes(1, 2))

    def of_key_heads(x):
        return x.reshape(batch, heads // group, group, keys, x.shape[3]).sum(2)

    if has_bias:
        shape = np.shape(options.bias)
        axes = tuple(i for i, n in enumerate(shape) if n == 1)
        grad_bias = grad_bias.sum(axes, keepdims=True)
    by_tokens = (out, lse, grad_query, of_key_heads(grad_key), of_key_heads(grad_value))
    return Attention(
        *(x.swapaxes(1, 2) for x in by_tokens), grad_bias, grad_slopes, grad_sinks
    )


def _heads_first(x):
    return np.asarray(x, np.float64).swapaxes(1, 2)
