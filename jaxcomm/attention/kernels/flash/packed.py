"""Runs of queries by one call of the packed kernel each, for all their documents."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.blocks import with_delta
from jaxcomm.attention.kernels.flash import apart, library
from jaxcomm.attention.kernels.flash.sequences import (
    MOST_DOCUMENTS,
    Sequences,
    sequences_of,
)
from jaxcomm.attention.kernels.kernel import Grads, Hop, Kernel, Saved, merge


def why_not(hop: Hop) -> str | None:
    """Say why the runs of a hop cannot be computed as packed sequences, or None."""
    mask = hop.mask
    has_rows = any(x.positions.ndim > 1 for x in (hop.queries, hop.keys))
    if has_rows and any(run.are in ("among", "behind") for run in hop.runs):
        return "the sequences of the batch differ in their positions"
    if mask.right not in (0, None) or (mask.right is None and mask.left is not None):
        return "in packed sequences a window ends at the query's own token"
    if any(run.are == "behind" for run in hop.runs):
        return None
    if mask.left is not None and not all(run.is_consecutive for run in hop.runs):
        return "a window is counted in tokens, and a rank's tokens jump"
    return None


def forward(hop: Hop, merged: Any, otherwise: Kernel) -> tuple[Any, Any]:
    """Attend in the runs of a hop.

    Args:
      merged: (out, lse) over other keys, to merge with; or None.
      otherwise: what computes documents that are too many, or in another order.
    """
    if hop.runs[0].are == "apart":
        return apart.forward(hop, merged, lambda part: _forward(part, None, otherwise))
    return _forward(hop, merged, otherwise)


def _forward(hop: Hop, merged: Any, otherwise: Kernel) -> tuple[Any, Any]:
    runs = [sequences_of(hop, run) for run in hop.runs]
    given, sums = hop.query.dtype, hop.sum_dtype
    # What a branch takes and returns is in memory: no more digits than are needed.
    returned = given if merged is None or hop.is_last else sums
    if merged is not None and hop.follows_one:
        merged = merged[0].astype(given), merged[1]

    def compute(count: int):
        found = [_attend(each, count) for each in runs]
        out, lse = (jnp.concatenate(each, 1) for each in zip(*found, strict=True))
        if merged is not None:
            out, lse = merge(*wide(*merged), *wide(out, lse))
        return out.astype(returned), lse

    def rest():
        if merged is None:
            out, lse = otherwise.forward(hop)
        else:
            out, lse = otherwise.forward_onto(hop, wide(*merged))
        return out.astype(returned), lse

    def wide(out, lse):
        return out.astype(sums), lse

    return wide(*_choose(hop, runs, compute, rest))


def backward(hop: Hop, saved: Saved, total: Any, otherwise: Kernel) -> Grads:
    """Return the gradients of the runs of a hop.

    Args:
      hop, otherwise: as in :func:`forward`.
      saved: what is known over all keys.
      total: gradient of the queries by other keys, to add to; or None.
    """
    if hop.runs[0].are == "apart":
        return apart.backward(
            hop, saved, total, lambda part, of: _backward(part, of, None, otherwise)
        )
    return _backward(hop, saved, total, otherwise)


def _backward(hop: Hop, saved: Saved, total: Any, otherwise: Kernel) -> Grads:
    runs = [sequences_of(hop, run) for run in hop.runs]
    given = hop.query.dtype
    # What is still to be summed is not rounded.
    of_query = given if total is None or hop.is_last else hop.sum_dtype
    if total is not None and hop.follows_one:
        total = total.astype(given)
    of_keys = given if len(hop.runs) == 1 else hop.sum_dtype

    def compute(count: int):
        found = (_gradients(each, saved, count) for each in runs)
        queries, *keys = zip(*found, strict=True)
        query = jnp.concatenate(queries, 1)
        if total is not None:
            query = wide(total) + wide(query)
        return cast(
            query,
            *(
                functools.reduce(jnp.add, [x.astype(of_keys) for x in each])
                for each in keys
            ),
        )

    def cast(query, key, value, *_):
        return query.astype(of_query), key.astype(of_keys), value.astype(of_keys)

    def wide(x):
        return x.astype(hop.sum_dtype)

    def rest():
        anew = saved.with_delta(hop)
        if total is None:
            return cast(*otherwise.backward(hop, anew))
        return cast(*otherwise.backward_onto(hop, anew, wide(total)))

    found = _choose(hop, runs, compute, rest)
    return Grads(*map(wide, found))


def _choose(hop: Hop, runs: list[Sequences], compute, rest):
    """Compute a hop in the way that its documents allow."""
    ids = hop.queries.segment_ids
    if ids is None:
        return compute(hop.query.shape[0])
    counts = sorted({min(count, ids.size) for count in MOST_DOCUMENTS})
    most = functools.reduce(jnp.maximum, [each.documents() for each in runs])
    are_right = functools.reduce(jnp.logical_and, [each.are_right() for each in runs])
    which = sum((most > count).astype(jnp.int32) for count in counts)
    which = jnp.where(are_right, which, len(counts))
    ways = [*(functools.partial(compute, count) for count in counts), rest]
    return jax.lax.switch(which, ways)


def _options(of: Sequences) -> dict:
    return {
        "scale": of.hop.scale,
        "is_causal": of.window[1] == 0,
        "window": of.window,
    }


def _packed(x, part: slice):
    """(B, T, ...) to (B * tokens, ...), of a part of the tokens."""
    return x[:, part].reshape(-1, *x.shape[2:])


def _attend(of: Sequences, count: int):
    """Return (out, lse) of a run: (B, queries, N, V) and (B, queries, N)."""
    hop = of.hop
    query = _packed(hop.query, of.rows)
    key, value = (_packed(x, of.columns) for x in (hop.key, hop.value))
    starts = of.starts(count)
    out, lse = library.forward(query, key, value, starts, **_options(of))
    shape = of.batch, of.queries
    lse = of.seen_rows(lse.T.reshape(*shape, -1), -jnp.inf)
    return out.reshape(*shape, *out.shape[1:]), lse


def _gradients(of: Sequences, saved: Saved, count: int):
    """Return those of a run's queries, and of all keys and values of its hop."""
    hop, (grad_out, out, lse, delta) = of.hop, saved
    given = hop.query, hop.key, hop.value
    query, key, value = given
    if hop.has_residual:
        query, key, value, out, grad_out = with_delta(*given, out, grad_out, delta)
    key, value = (_packed(x, of.columns) for x in (key, value))
    query, out, grad_out = (_packed(x, of.rows) for x in (query, out, grad_out))
    lse = of.seen_rows(lse[:, of.rows], jnp.inf)
    lse, starts = _packed(lse, slice(None)).T, of.starts(count)
    grads = library.backward(
        query, key, value, lse, out, grad_out, starts, **_options(of)
    )
    lengths = of.queries, of.keys, of.keys
    query, *keys = (
        x.reshape(of.batch, length, *x.shape[1:])[..., : whole.shape[3]]
        for x, length, whole in zip(grads, lengths, given, strict=True)
    )
    padding = [(0, 0)] * 4
    padding[1] = of.run.keys[0], hop.key.shape[1] - of.run.keys[1]
    return (query, *(jnp.pad(x, padding) for x in keys))
