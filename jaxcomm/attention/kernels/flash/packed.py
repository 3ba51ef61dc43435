"""Runs of queries by one call of the packed kernel each, for all their documents."""

import functools

import jax.numpy as jnp

from jaxcomm.attention.kernels.blocks import with_delta
from jaxcomm.attention.kernels.flash import library, sequences
from jaxcomm.attention.kernels.kernel import Grads, Hop, Saved
from jaxcomm.attention.mask import Run


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


def forward(hop: Hop):
    """Attend in the runs of a hop: (out, lse)."""
    found = [_attend(*of) for of in _runs(hop)]
    out, lse = (jnp.concatenate(each, 1) for each in zip(*found, strict=True))
    return out, lse


def backward(hop: Hop, saved: Saved) -> Grads:
    """Return the gradients of the runs of a hop."""
    of_keys = hop.query.dtype if len(hop.runs) == 1 else hop.sum_dtype
    found = (_gradients(*of, saved) for of in _runs(hop))
    queries, *keys = zip(*found, strict=True)
    sums = (
        functools.reduce(jnp.add, [x.astype(of_keys) for x in each]) for each in keys
    )
    return Grads(jnp.concatenate(queries, 1), *sums)


def _runs(hop: Hop):
    """Return the hop with each of its runs, and where its sequences begin."""
    return [
        (hop, run, sequences.of_run(hop, run) if run.starts is None else run.starts)
        for run in hop.runs
    ]


def _options(hop: Hop, run: Run) -> dict:
    left, right = hop.mask.left, hop.mask.right
    window = -1 if left is None else left, -1 if right is None else right
    if run.are == "apart":  # What is seen of another rank's keys is all of a sequence.
        window = -1, -1
    if run.are == "behind":
        # The last query is as far from the last key as the queries are many.
        window = (left or 0) - (run.queries[1] - run.queries[0]), -1
    longest = run.queries[1] - run.queries[0], run.keys[1] - run.keys[0]
    options = {"scale": hop.scores.scale, "is_causal": window[1] == 0, "window": window}
    return options | {"longest": longest}


def _packed(x, part: tuple[int, int]):
    """(B, T, ...) to (B * tokens, ...), of a part of the tokens."""
    return x[:, slice(*part)].reshape(-1, *x.shape[2:])


def _seen(hop: Hop, run: Run, lse, otherwise: float):
    """Return the log-sum-exp of (B, queries, N), of rows that see nothing another."""
    ids = hop.queries.segment_ids
    if run.are != "behind" or ids is None:
        return lse
    ids = ids[:, slice(*run.queries)]
    is_seen = (ids == ids[:, :1]) & (ids >= 0)
    return jnp.where(is_seen[..., None], lse, otherwise)


def _attend(hop: Hop, run: Run, starts):
    """Return (out, lse) of a run: (B, queries, N, V) and (B, queries, N)."""
    query = _packed(hop.query, run.queries)
    key, value = (_packed(x, run.keys) for x in (hop.key, hop.value))
    out, lse = library.forward(query, key, value, starts, **_options(hop, run))
    shape = hop.query.shape[0], run.queries[1] - run.queries[0]
    lse = _seen(hop, run, lse.T.reshape(*shape, -1), -jnp.inf)
    return out.reshape(*shape, *out.shape[1:]), lse


def _gradients(hop: Hop, run: Run, starts, saved: Saved):
    """Return those of a run's queries, and of all keys and values of its hop."""
    grad_out, out, lse, delta = saved
    given = hop.query, hop.key, hop.value
    query, key, value = given
    if hop.has_residual:
        query, key, value, out, grad_out = with_delta(*given, out, grad_out, delta)
    key, value = (_packed(x, run.keys) for x in (key, value))
    query, out, grad_out = (_packed(x, run.queries) for x in (query, out, grad_out))
    lse = _seen(hop, run, lse[:, slice(*run.queries)], jnp.inf)
    lse = lse.reshape(-1, lse.shape[2]).T
    grads = library.backward(
        query, key, value, lse, out, grad_out, starts, **_options(hop, run)
    )  # fmt: skip
    parts = run.queries, run.keys, run.keys
    query, *keys = (
        x.reshape(whole.shape[0], part[1] - part[0], *x.shape[1:])[
            ..., : whole.shape[3]
        ]
        for x, part, whole in zip(grads, parts, given, strict=True)
    )
    padding = [(0, 0)] * 4
    padding[1] = run.keys[0], hop.key.shape[1] - run.keys[1]
    return (query, *(jnp.pad(x, padding) for x in keys))
