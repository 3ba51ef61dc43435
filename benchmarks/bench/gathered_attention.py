"""The obvious rival of a ring: gather all keys and values, then attend once.

It has the compute tiles of the ring, so that the two differ in communication alone.
"""

import jax

import jaxcomm
from bench.tokens import tokens_of


def gathered_attention(query, key, value, *, axis_name, schedule):
    """Compute causal attention over a split sequence with ``jax.lax.all_gather``.

    The gradients of key and value come home by ``jax.lax.psum_scatter``, the transpose
    of the gather.

    Args:
      query, key, value: (B, T, N, D) floating, the tokens of this rank.
      axis_name: the mesh axis over which the sequence is split.
      schedule: which positions each rank holds, as in ``jaxcomm.Layout``.

    Returns:
      (B, T, N, D) in the dtype of ``query``.
    """
    size = jax.lax.axis_size(axis_name)
    layout = jaxcomm.Layout(schedule, size, size * query.shape[1])
    return jaxcomm.ring_attention(
        query,
        key,
        value,
        axis_name,
        tokens_of(layout, axis_name),
        is_causal=True,
        strategy="all_gather",
        backend="xla",
    )
