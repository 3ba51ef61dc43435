"""The hops of a ring, in their order, and what travels between them."""

import copy
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm import compat
from jaxcomm.attention.kernels.kernel import Grads, Hop, Saved
from jaxcomm.attention.kernels.primitive import hop_backward, hop_forward
from jaxcomm.attention.kernels.selection import rounds, unpacked
from jaxcomm.attention.strategies.hops import (
    distances,
    hop_of_block,
    hop_of_others,
    members_at,
    own_hop,
)
from jaxcomm.attention.strategies.seen_hops import last_seen_hop, share_documents
from jaxcomm.attention.strategies.strategy import AttentionCall, Inputs, Keys, keep
from jaxcomm.collectives.permute import ring_shift
from jaxcomm.collectives.split_phase import ring_shift_start
from jaxcomm.compat import gpus

# Bytes of results of hops that wait to be added up at once.
_HELD = 2**28
# Rings of at most so many ranks are no loop on a GPU.
_UNROLLED_RANKS = 8


class Loop:
    """The hops of one call.

    Attributes:
      distances: whose keys are here at each turn: those of member ``me - distance``.
      last: the last turn, in which nothing is sent.
      own, others: the hop of a rank's own keys, and what those of others have in
        common, with the arrays of this rank.
      own_block: the keys to begin with.
      packing: how documents are packed, a ``packed_ring.Packing``. If None, kernels
        take all documents.
      is_way: whether it is a way of a pass that is chosen elsewhere. Its arrays are a
        rank's own, backward too.
      unrolls: whether the hops are no loop of the program.
      keeps_parts: whether results of hops are added up by one kernel at the end, and
        not by one for each hop. They are rounded, so this reads less, too.
    """

    def __init__(self, width: int, call: AttentionCall, inputs: Inputs):
        self.call, self.inputs, self.width = call, inputs, width
        self.members = call.size // width
        self.distances = distances(inputs, call.mask, width)
        self.last = len(self.distances) - 1
        self.own_block = inputs.keys
        self.packing: Any = None
        self.is_way = False
        self.is_uniform = self.distances == tuple(range(len(self.distances)))
        self.own = self.others = own_hop(call, inputs, width)
        if self.last:
            self.others = hop_of_others(call, inputs, width)
        is_kernel = gpus.are_of_mesh() and self.others.kernels[0].name != "xla"
        self.unrolls = is_kernel and self.members <= _UNROLLED_RANKS
        self.keeps_parts = self.unrolls and rounds(self.others)

    @property
    def hops(self) -> tuple[Hop, ...]:
        """What the kernels are to compute."""
        return (self.own, self.others) if self.last else (self.own,)

    def unpacked(self) -> "Loop":
        """Return the same hops for kernels that take all documents."""
        ring = self.gathered()
        ring.own, ring.others = map(unpacked, (self.own, self.others))
        ring.is_way = True
        return ring

    def packed(self, packing, is_alone: bool) -> "Loop":
        """Return the same hops for a kernel that takes documents packed.

        Args:
          packing: how.
          is_alone: whether the rank's own keys are the only hop.
        """
        ring = copy.copy(self) if is_alone else self.gathered()
        ring.packing, ring.is_way = packing, True
        ring.keeps_parts = self.unrolls and packing.is_pass
        if is_alone:
            ring.last = 0
        elif packing.is_pass:  # Ranks know each other's documents.
            ring.own_block = self.own_block._replace(segment_ids=None)
        return ring

    def gathered(self, inputs: Inputs | None = None) -> "Loop":
        """Return the same hops, with the order of all ranks' tokens.

        Args:
          inputs: of the same shapes. If None, those that are here.
        """
        ring = copy.copy(self)
        ring.inputs = (inputs or self.inputs).gathered(self.call)
        if inputs is not None:
            ring.own_block = inputs.keys
        return ring

    @property
    def starts_apart(self):
        """Whether a rank's own block is computed before the hops, and not as one."""
        is_packed = self.packing is not None
        return is_packed or bool(self.others.blocks) or self.unrolls

    @property
    def may_end_early(self):
        """Whether the tokens may show that no rank needs the last blocks.

        On a GPU the host has to wait for the tokens, which documents are worth.
        """
        inputs, axes = self.inputs, self.call.axis_name
        are_rules = inputs.query_layout.is_static and inputs.key_layout.is_static
        may_show = inputs.key_ids is not None
        if compat.mesh_platform() == "cpu":
            may_show |= not are_rules
        return (
            bool(self.last)
            and self.is_uniform
            and self.width == 1
            and may_show
            and (compat.mesh_platform() == "cpu" or gpus.are_of_mesh())
            # Else groups of ranks might disagree, which XLA's collectives wait for.
            and compat.manual_axes()
            <= set(axes if isinstance(axes, tuple) else (axes,))
        )

    def last_seen(self, inputs: Inputs):
        """Return the last turn that some rank needs, traced.

        On GPUs it is 0 or ``last``: at each turn the host would wait.
        """
        if compat.mesh_platform() == "cpu":
            return last_seen_hop(self.call, inputs)
        return jnp.where(share_documents(self.call, inputs), self.last, 0)

    def go(self, around, own, seen):
        """Return ``around(last turn)``, or ``own()`` if a rank's own block is all.

        Args:
          around: takes the last turn, which may be traced.
          own: needs no block of others.
          seen: the last turn that some rank needs, traced; or None if it is ``last``.
        """
        if not self.last:
            return own()
        if seen is None:
            return around(self.last)
        if compat.mesh_platform() == "cpu":
            return jax.lax.cond(seen > 0, lambda: around(seen), own)
        return jax.lax.cond(seen > 0, lambda: around(self.last), own)

    def rounded(self, x):
        """Return what is the result of a branch.

        A GPU writes it to memory. Here it has the dtype to which it is rounded anyway.
        """
        if self.is_way or (self.may_end_early and compat.mesh_platform() != "cpu"):
            return x.astype(self.inputs.query.dtype)
        return x

    def few(self, parts: list, add) -> list:
        """Return results of hops, or what they add up to if they are large."""
        itemsize = self.inputs.query.dtype.itemsize
        held = sum(x.size for x in jax.tree.leaves(parts)) * itemsize
        if len(parts) == 1 or held <= _HELD:
            return parts
        return [jax.lax.optimization_barrier(add(parts))]

    def written(self, x, other):
        """Return what a kernel has written of its two results, for others to wait."""
        if self.keeps_parts:
            return x.astype(self.inputs.query.dtype)
        return other if other.ndim < x.ndim else completion(x)

    def as_one(self, arrays):
        """Return what travels as one array, where one kernel computes all of it."""
        is_one = self.keeps_parts and len({x.shape for x in arrays}) == 1
        return jnp.stack(arrays) if is_one else arrays

    def kept(self, block: Keys) -> Inputs:
        """Return what the backward pass needs: the inputs, with the last block."""
        key, value, ids = keep(block) if self.last else block
        return self.inputs._replace(key=key, value=value, key_ids=ids)

    def shift(self, turn: int) -> int:
        """Return how many members further a block goes after a turn."""
        return self.distances[turn + 1] - self.distances[turn]

    def distance_at(self, turn):
        """Return that of a turn, which may be traced if the distances are 0, 1, ..."""
        return turn if self.is_uniform else self.distances[turn]

    def for_hops(self, first, last, step, carry, is_backward=False):
        """Run ``carry = step(turn, carry, shift)`` from turn ``first`` until ``last``.

        A ``last`` that is traced ends the turns, but not the loop: JAX differentiates
        loops of a fixed length alone. Backward, turns are counted from the last hop,
        and ``shift`` is a pair: how far the block goes, and how far its predecessor's
        gradients.
        """
        one: Any = (1, 1) if is_backward else 1
        if not self.is_uniform:
            count = len(self.distances) - 1
            for turn in range(first, last):
                shift: Any = self.shift(turn)
                if is_backward:
                    at = count - turn - 1
                    shift = self.shift(at), self.shift(at + 1)
                carry = step(turn, carry, shift)
            return carry
        is_fixed = isinstance(last, int)
        seen, last = last, last if is_fixed else self.last

        def body(hop, carry):
            if is_fixed:
                return step(hop, carry, one)
            return jax.lax.cond(
                hop < seen, lambda x: step(hop, x, one), lambda x: x, carry
            )

        if self.unrolls or (self.starts_apart and last - first < 2):
            # A GPU's loop writes every carry, and copies what travels; of one or no
            # turn it asks the host.
            for hop in range(first, last):
                carry = body(hop, carry)
            return carry
        if last - first >= 2:
            return jax.lax.fori_loop(first, last, body, carry)
        # XLA would inline a loop of no or one turn. Behind a barrier it stays a loop,
        # so that two ranks need the same memory as any larger ring.
        last = jax.lax.optimization_barrier(jnp.int32(last))
        return jax.lax.fori_loop(jnp.int32(first), last, body, carry)

    def start(self, block, shift):
        """Begin to send a pytree to the member that is ``shift`` further."""
        return ring_shift_start(block, self.call.axis_name, shift=shift * self.width)

    def start_pair(self, first, second, shift, second_shift):
        """Begin to send two pytrees; in one call if they go equally far."""
        if shift == second_shift:
            return self.start((first, second), shift)
        return [self.start(first, shift), self.start(second, second_shift)]

    def then(self, arriving, block):
        """Return the block, for what is to be computed while it is sent."""
        for handle in arriving if isinstance(arriving, list) else [arriving]:
            block = handle.then(block)
        return block

    def done(self, arriving, after) -> Any:
        """Return what was begun to be sent here, once ``after`` is computed."""
        if isinstance(arriving, list):
            return [handle.done(after=after) for handle in arriving]
        return arriving.done(after=after)

    def last_block(self) -> Keys:
        """Return the block that is here at the last turn of the way forward."""
        if not (self.is_way and self.last):
            return self.own_block
        axis, distance = self.call.axis_name, self.distances[-1]
        return ring_shift(self.own_block, axis, shift=distance)

    def hop(self, block: Keys, distance) -> Hop:
        """Return the hop of a block; 0 is the distance of a rank's own."""
        hop, ids = (self.own if is_own(distance) else self.others), self.inputs.key_ids
        if block.segment_ids is None and self.packing is not None:
            if not is_own(distance):
                source = members_at(self.call, self.width, distance)[1]
                ids = self.packing.segment_ids(source)
            block = block._replace(segment_ids=ids)
        return hop_of_block(hop, self.call, self.inputs, self.width, block, distance)

    def attend(self, block: Keys, distance, onto=None):
        """Return (out, lse) of a block, merged with those of others, if given."""
        hop = self.hop(block, distance)
        if self.packing is None:
            return hop_forward(hop, onto)
        # What a branch returns is in memory: no more digits than are needed.
        is_last = onto is None or self.last == 1
        dtype = self.inputs.query.dtype if is_last else hop.sum_dtype

        def compute(hop):
            out, lse = hop_forward(hop, onto)
            return out.astype(dtype), lse

        def nothing():
            assert onto is not None
            return onto[0].astype(dtype), onto[1]

        out, lse = self.packing.compute(compute, hop, distance, nothing)
        return out.astype(lse.dtype), lse

    def gradients(self, block: Keys, distance, saved: Saved, onto=None) -> Grads:
        """Return what a block adds to the gradients: see :func:`hop_backward`."""
        hop = self.hop(block, distance)
        if self.packing is None:
            return hop_backward(hop, saved, onto)

        # A rank's own keys are the last: see attend. Other sums are not rounded.
        is_last = not self.packing.is_pass and is_own(distance)

        def compute(hop):
            found = hop_backward(hop, saved.with_delta(hop), onto)
            query = self.rounded(found.query) if is_last else found.query
            return found._replace(query=query)

        def nothing():
            arrays = hop.query, hop.key, hop.value
            query, *keys = (jnp.zeros_like(x, hop.sum_dtype) for x in arrays)
            return Grads(query if onto is None else onto, *keys)

        return self.packing.compute(compute, hop, distance, nothing)

    def columns(self, grad_bias, distance):
        """Put the gradient of a block's columns into that of the whole bias."""
        if grad_bias is None:
            return None
        shape = (*grad_bias.shape[:3], grad_bias.shape[3] * self.members)
        total = jnp.zeros_like(grad_bias, shape=shape)
        return self.add_columns(total, grad_bias, distance)

    def add_columns(self, total, grad_bias, distance):
        """Write the gradient of a block's columns, which no other hop has."""
        if grad_bias is None:
            return None
        _, source = members_at(self.call, self.width, distance)
        start = source * grad_bias.shape[3]
        return jax.lax.dynamic_update_slice_in_dim(total, grad_bias, start, axis=3)


def is_own(distance) -> bool:
    """Say whether it is that of a rank's own keys: others may be traced."""
    return isinstance(distance, int) and not distance


def completion(arrays):
    """Return one element that depends on the kernel which computed the arrays."""
    return jax.tree.leaves(arrays)[0].reshape(-1)[:1]
