"""Exact attention over a sequence that is split across a ring of devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxcomm.attention import arguments
from jaxcomm.attention.kernels import cudnn_support
from jaxcomm.attention.kernels.primitive import hop_backward, hop_forward
from jaxcomm.attention.kernels.xla import HopConfig, sum_dtype
from jaxcomm.attention.mask import Visibility
from jaxcomm.attention.merge import merge
from jaxcomm.attention.schedules.block import Blocks
from jaxcomm.attention.schedules.registry import get_schedule
from jaxcomm.attention.schedules.schedule import Schedule
from jaxcomm.collectives.permute import ring_shift
from jaxcomm.collectives.split_phase import ring_shift_start
from jaxcomm.compat import varying_axes
from jaxcomm.primitives import arguments as _arguments
from jaxcomm.primitives.call import Call
from jaxcomm.primitives.pvary import vary

# Whether hops travel while their predecessors are computed. Tests compare.
_OVERLAPS = True
# Rings of at most so many ranks are no loop on a GPU.
_UNROLLED_RANKS = 8
# Of an unrolled ring, hops whose results wait to be summed at once.
_SUMMED_HOPS = 4


@arguments.refuses_unknown
def ring_attention(
    query,
    key,
    value,
    *,
    axis_name,
    is_causal: bool = False,
    scale: float | None = None,
    schedule: str | Schedule = "zigzag",
    length: int | None = None,
    key_length: int | None = None,
    return_residual: bool = False,
    implementation: str | None = None,
    lane: str | None = None,
    backend: str | None = None,
    bias=None,
    mask=None,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    dropout_rate=None,
    sinks=None,
    logits_soft_cap=None,
):
    """Compute ``jax.nn.dot_product_attention`` over a sequence split across devices.

    For use inside ``jax.shard_map``. Each rank keeps its queries while keys and values
    travel around the ring: N - 1 sends forward; backward N - 1 more, the other way
    round, and as many of their float32 gradients. Every send has a block to be computed
    meanwhile. What is kept for the backward pass is the block that arrived last, in
    place of the rank's own. Sums are float32 throughout, so the error does not grow
    with the number of ranks. Keys and values with fewer heads travel as they are.

    Source: Liu et al., Ring Attention with Blockwise Transformers, 2023.

    Args:
      query: (B, T, N, D) floating, the tokens of this rank as ``reorder`` deals them.
      key: (B, S, K, D), same dtype; K divides N. S may differ from T if not causal.
      value: (B, S, K, D), same dtype.
      axis_name: the mesh axis (or tuple of axes) over which the sequence is split.
      is_causal: whether a token sees only itself and the tokens before it.
      scale: Python number that multiplies the scores. If None, ``1 / sqrt(D)``.
      schedule: which positions each rank holds: ``"contiguous"``, ``"zigzag"``,
        ``"striped"`` or a ``Schedule``. The one given to ``reorder``.
      length: int, tokens of the whole sequence without padding. Padding is not seen;
        its own rows give 0 and a residual of -inf. If None, no token is padding.
      key_length: the same for key and value. If None, ``length``.
      return_residual: whether to return the log-sum-exp of the scores as well.
      implementation: what computes the hops. ``"cudnn"``: cuDNN's fused attention, on
        CUDA, for bfloat16 and float16, head sizes that are multiples of 8 up to 256,
        and no padding; it is an error where that cannot be had. ``"xla"``: XLA, tile by
        tile. If None, cuDNN where it can be had and XLA elsewhere.
      lane: which communicator carries the hops. If None, the default lane.
      backend: what moves the bytes. If None, the backend of the platform.
      bias, mask, query_seq_lengths, key_value_seq_lengths, local_window_size,
        dropout_rate, sinks, logits_soft_cap: not supported yet; must be None.

    Returns:
      (B, T, N, D) in the dtype of ``query``. With ``return_residual`` a tuple of that
      and (B, T, N) float32, which is differentiable. Float64 inputs are summed and have
      their residual in float64.

    Raises:
      ValueError: shapes do not fit together, a length is beyond what the ranks hold,
        the schedule is unknown, or something unsupported was asked for; also when
        compiled, if that is the implementation.
      TypeError: a dtype is not floating or differs; scale, a length or a flag is of
        another type or traced; or an argument of that name is not known.
      NameError: ``axis_name`` is not bound; call inside ``jax.shard_map``.

    >>> def attend(q, k, v):
    ...     return ring_attention(q, k, v, axis_name="context", is_causal=True)
    >>> split = jax.P(None, "context")
    >>> x = reorder(jnp.ones((1, 4096, 4, 64)), 8, schedule="zigzag")
    >>> jax.jit(jax.shard_map(attend, in_specs=split, out_specs=split))(x, x, x).shape
    (1, 4096, 4, 64)
    """
    arguments.refuse_unsupported(
        bias=bias,
        mask=mask,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        dropout_rate=dropout_rate,
        sinks=sinks,
        logits_soft_cap=logits_soft_cap,
    )
    query, key, value = map(jnp.asarray, (query, key, value))
    if isinstance(axis_name, list):
        axis_name = tuple(axis_name)
    is_causal = _arguments.flag(is_causal, "ring_attention: is_causal")
    return_residual = _arguments.flag(
        return_residual, "ring_attention: return_residual"
    )
    arguments.check_arrays(query, key, value, is_causal)
    size = jax.lax.axis_size(axis_name)
    queries, keys = query.shape[1], key.shape[1]
    dealer = get_schedule(schedule)
    visibility = Visibility(
        is_causal,
        *arguments.check_lengths(length, key_length, queries, keys, size),
    )
    blocks = cudnn_support.fused_blocks(
        implementation,
        query,
        key,
        schedule=dealer,
        visibility=visibility,
        size=size,
    )
    call = _arguments.call_of("ring_attention", axis_name, lane=lane, backend=backend)
    unrolls = size <= _UNROLLED_RANKS and cudnn_support.is_for_gpus(blocks)
    ring = _Ring(
        axis_name=axis_name,
        size=size,
        schedule=dealer,
        lane=call.lane,
        backend=call.backend,
        overlaps=_OVERLAPS,
        unrolls=unrolls,
        parts=cudnn_support.parts_of_queries(blocks, queries, keys) if unrolls else 1,
        hop=HopConfig(
            scale=arguments.check_scale(scale, query.shape[3]),
            visibility=visibility,
            query_segments=dealer.segments(queries),
            key_segments=dealer.segments(keys),
            implementation=implementation,
            blocks=blocks,
            has_residual=return_residual,
        ),
    )
    attended = _attend_in_one(ring, *_vary_alike((query, key, value), ring))
    out, residual = attended  # pyright: ignore[reportGeneralTypeIssues]
    return (out, residual) if return_residual else out


def _vary_alike(arrays, ring):
    """Mark all arrays as varying over the ring and over each other's axes.

    The loop's carries need one type; and the transpose of this mark is what sums the
    gradients of an input that is replicated over one of the axes.
    """
    ring_axes = varying_axes(jax.lax.axis_index(ring.axis_name))
    # Under check_vma=False nothing is marked, and shard_map itself sums the gradients.
    if not ring_axes:
        return arrays
    axes = ring_axes.union(*map(varying_axes, arrays))
    call = Call(
        "ring_attention", tuple(sorted(axes)), lane=ring.lane, backend=ring.backend
    )
    return vary(arrays, call)


@dataclasses.dataclass(frozen=True)
class _Ring:
    """What the loop knows before it sees an array."""

    axis_name: str | tuple[str, ...]
    size: int
    schedule: Schedule
    lane: str | None
    backend: str | None
    overlaps: bool
    unrolls: bool
    parts: int
    hop: HopConfig

    @property
    def may_be_fused(self):
        """Whether cuDNN may compute the hops, where the program is for CUDA."""
        return self.hop.blocks is not None

    @property
    def first_hop(self):
        """Of a rank's own block: the schedule says which part of it is computed."""
        return self._hop_of(lambda blocks: Blocks(*[blocks.same] * 3))

    @property
    def other_hops(self):
        """Of the blocks of others, from which a device chooses between two parts."""
        return self._hop_of(
            lambda blocks: dataclasses.replace(blocks, same=blocks.earlier)
        )

    def _hop_of(self, choose):
        blocks = self.hop.blocks and choose(self.hop.blocks)
        return dataclasses.replace(self.hop, blocks=blocks)

    def start(self, block, shift):
        """Begin to send a pytree to the rank that is ``shift`` further, in one call."""
        send = ring_shift_start if self.overlaps else ring_shift
        return send(
            block, self.axis_name, shift=shift, lane=self.lane, backend=self.backend
        )

    def then(self, arriving, block):
        """Return the block, for what is to be computed while it is sent."""
        return arriving.then(block) if self.overlaps else block

    def done(self, arriving, after):
        """Return what was begun to be sent here, once ``after`` is computed."""
        if not self.overlaps:
            return arriving
        return arriving.done(after=after)

    def positions(self, hop, query, key):
        """Return the positions of the query and of the keys held at ``hop``."""
        rank = jax.lax.axis_index(self.axis_name)
        source = (rank - hop) % self.size
        query_at = self.schedule.positions(rank, self.size, query.shape[1])
        key_at = self.schedule.positions(source, self.size, key.shape[1])
        return query_at, key_at


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring, query, key, value):
    return _forward(ring, query, key, value)[0]


def _for_hops(ring, first, last, step, carry):
    """Run ``carry = step(hop, carry)`` for the hops from ``first`` until ``last``."""
    if ring.unrolls or (ring.may_be_fused and last - first < 2):
        # A GPU's loop writes every carry, and copies what travels; of one or no turn it
        # asks the host. Here one kernel adds what several hops add, and the barrier is
        # there lest it wait for all of them.
        for hop in range(first, last):
            carry = step(jnp.int32(hop), carry)
            if hop % _SUMMED_HOPS == 0:
                carry = jax.lax.optimization_barrier(carry)
        return carry
    if last - first >= 2:
        return jax.lax.fori_loop(first, last, step, carry)
    # XLA would inline a loop of no or one turn. Behind a barrier it stays a loop, so
    # that two ranks need the same memory as any larger ring.
    last = jax.lax.optimization_barrier(jnp.int32(last))
    return jax.lax.fori_loop(jnp.int32(first), last, step, carry)


def _forward(ring, query, key, value):
    def attend(block, hop, config):
        query_at, key_at = ring.positions(hop, query, block[0])
        return hop_forward(query, block[0], block[1], query_at, key_at, config=config)

    def in_parts(attended):
        parts = (jnp.split(x, ring.parts, axis=1) for x in attended)
        return list(zip(*parts, strict=True))

    def attend_and_merge(merged, block, hop):
        attended = in_parts(attend(block, hop, ring.other_hops))
        return [merge(*a, *b) for a, b in zip(merged, attended, strict=True)]

    def step(hop, carry):
        merged, block = carry
        arriving = ring.start(block, 1)
        merged = attend_and_merge(merged, ring.then(arriving, block), hop)
        return merged, ring.done(arriving, after=[lse for _, lse in merged])

    def result(out, lse, block):
        out = out.astype(query.dtype)
        return (out, lse), (query, *block, out, lse)

    block = key, value
    if ring.size == 1:
        out, lse = attend(block, 0, ring.first_hop)
        return result(out, lse, block)
    if ring.may_be_fused:
        # Outside the loop: there is nothing to merge with, and nothing to choose.
        arriving = ring.start(block, 1)
        attended = attend(ring.then(arriving, block), 0, ring.first_hop)
        block = ring.done(arriving, after=attended[1])
        first = 1
    else:
        out = jnp.zeros_like(query, sum_dtype(query.dtype))
        attended = out, jnp.full_like(out[..., 0], -jnp.inf)
        first = 0
    carry = in_parts(attended), block
    merged, block = _for_hops(ring, first, ring.size - 1, step, carry)
    # The last hop is outside the loop: it computes and sends nothing.
    merged = attend_and_merge(merged, block, ring.size - 1)
    outs, lses = zip(*merged, strict=True)
    return result(jnp.concatenate(outs, 1), jnp.concatenate(lses, 1), block)


def _backward(ring, residuals, grads):
    """Go through the hops from the last to the first, with the block that is here.

    So a rank's own block comes last: while it is computed its gradients come home.

    Source: NVIDIA, TransformerEngine, context parallelism, 2024.
    """
    query, key, value, out, lse = residuals
    grad_out, grad_lse = grads
    # Once, not per hop. A score moves lse by its weight, hence the second term.
    delta = (grad_out.astype(lse.dtype) * out.astype(lse.dtype)).sum(-1) - grad_lse

    def gradients(block, hop, config):
        query_at, key_at = ring.positions(hop, query, block[0])
        grad_query, grad_key, grad_value = hop_backward(
            query,
            block[0],
            block[1],
            query_at,
            key_at,
            grad_out,
            lse,
            delta,
            out,
            config=config,
        )
        return grad_query, (grad_key, grad_value)

    def step(turn, carry):
        grad_query, grad_block, block = carry
        # The gradients of a block follow the block one hop behind, in one call.
        arriving = ring.start((block, grad_block), -1)
        added_query, added_block = gradients(
            ring.then(arriving, block), ring.size - 1 - turn, ring.other_hops
        )
        grad_query += added_query
        block, following = ring.done(arriving, after=_one_of(added_block))
        grad_block = jax.tree.map(jnp.add, following, added_block)
        return grad_query, grad_block, block

    block = (key, value)
    if ring.size == 1:
        grad_query, grad_block = gradients(block, 0, ring.first_hop)
    else:
        # Not earlier: the sends of the way forward are still on their way.
        block, lse = jax.lax.optimization_barrier((block, lse))
        arriving = ring.start(block, -1)
        grad_query, grad_block = gradients(
            ring.then(arriving, block), ring.size - 1, ring.other_hops
        )
        block = ring.done(arriving, after=_one_of(grad_block))
        carry = grad_query, grad_block, block
        carry = _for_hops(ring, 1, ring.size - 1, step, carry)
        grad_query, grad_block, block = carry
        following = ring.start(grad_block, -1)
        added_query, added_block = gradients(
            ring.then(following, block), 0, ring.first_hop
        )
        grad_query += added_query
        following = ring.done(following, after=_one_of(added_block))
        grad_block = jax.tree.map(jnp.add, following, added_block)
    dtype = query.dtype
    return tuple(grad.astype(dtype) for grad in (grad_query, *grad_block))


def _one_of(arrays):
    """Return a number that is there when the arrays are, which come of one kernel."""
    return jax.tree.leaves(arrays)[0].reshape(-1)[:1]


_attend.defvjp(_forward, _backward)
# Where the caller compiles nothing, JAX compiles every operation by itself, and loops
# anew at each call: this makes one of all.
_attend_in_one = jax.jit(_attend, static_argnums=0)
