"""The obvious rival of a ring: gather all keys and values, then attend once.

It has the compute tiles of the ring, so that the two differ in communication alone.
"""

import dataclasses
import functools

import jax

from jaxcomm.attention.kernels.xla import HopConfig, hop_backward, hop_forward
from jaxcomm.attention.mask import Visibility
from jaxcomm.attention.schedules.registry import get_schedule
from jaxcomm.attention.schedules.schedule import Schedule


def gathered_attention(query, key, value, *, axis_name, schedule):
    """Compute causal attention over a split sequence with ``jax.lax.all_gather``.

    The gradients of key and value come home by ``jax.lax.psum_scatter``, the transpose
    of the gather.

    Args:
      query, key, value: (B, T, N, D) floating, the tokens of this rank.
      axis_name: the mesh axis over which the sequence is split.
      schedule: which positions each rank holds, as in ``jaxcomm.ring_attention``.

    Returns:
      (B, T, N, D) in the dtype of ``query``.
    """
    size = jax.lax.axis_size(axis_name)
    length = query.shape[1]
    dealer = get_schedule(schedule)
    segments = dealer.segments(length)
    whole = _Whole(
        axis_name=axis_name,
        size=size,
        length=length,
        schedule=dealer,
        hop=HopConfig(
            scale=query.shape[3] ** -0.5,
            visibility=Visibility(True, size * length, size * length),
            query_segments=segments,
            key_segments=segments * size,
        ),
    )
    key, value = jax.lax.all_gather((key, value), axis_name, axis=1, tiled=True)
    return _attend(whole, query, key, value)


@dataclasses.dataclass(frozen=True)
class _Whole:
    """What is known before the arrays are."""

    axis_name: str
    size: int
    length: int
    schedule: Schedule
    hop: HopConfig

    def positions(self):
        """Return the positions of the local queries and of all keys."""
        rank = jax.lax.axis_index(self.axis_name)
        return (
            self.schedule.positions(rank, self.size, self.length),
            self.schedule.shard(self.size, self.length),
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(whole, query, key, value):
    return _forward(whole, query, key, value)[0]


def _forward(whole, query, key, value):
    out, lse = hop_forward(query, key, value, *whole.positions(), config=whole.hop)
    out = out.astype(query.dtype)
    return out, (query, key, value, out, lse)


def _backward(whole, residuals, grad_out):
    query, key, value, out, lse = residuals
    delta = (grad_out.astype(lse.dtype) * out.astype(lse.dtype)).sum(-1)
    queries, keys = whole.positions()
    grads = hop_backward(
        query, key, value, queries, keys, grad_out, lse, delta, config=whole.hop
    )
    return tuple(grad.astype(query.dtype) for grad in grads)


_attend.defvjp(_forward, _backward)
