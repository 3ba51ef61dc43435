"""The hops of a pass, in their order, and what travels between them."""

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
    hops_of,
    members_at,
)
from jaxcomm.attention.strategies.strategy import AttentionCall, Inputs, Keys, keep
from jaxcomm.collectives.permute import ring_shift
from jaxcomm.collectives.split_phase import ring_shift_start
from jaxcomm.compat import gpus

# Bytes of results of hops that wait to be added up at once.
_HELD = 2**28
# Rings of at most so many ranks are no loop on a GPU.
_UNROLLED_RANKS = 8


class Loop:
    """The hops of one pass: over a rank's own keys; then over others, around a ring.

    Attributes:
      distances: whose keys are here at each turn: those of member ``me - distance``.
      last: the last turn, in which nothing is sent.
      own, others: the hop of a rank's own keys, and what those of others have in
        common, with the arrays of this rank.
      own_block: the keys to begin with.
      beside: what else a rank computes, in one call more, in place of a ring; or None.
      look: finds where documents begin, given a ``Packed`` and the most pieces of a
        rank. If None, those of all ranks are looked at.
      packing: how documents are packed, a ``packing.Packing``. If None, kernels
        take all documents.
      is_way: whether it is a way of a pass that is chosen elsewhere. Its arrays are a
        rank's own, backward too.
      unrolls: whether the hops are no loop of the program.
      keeps_parts: whether results of hops are added up by one kernel at the end, and
        not by one for each hop. They are rounded, so this reads less, too.
    """

    beside: Any = None
    look: Any = None
    packing: Any = None
    is_way = False
    unrolls = keeps_parts = False

    def __init__(self, call: AttentionCall, inputs: Inputs, own: Hop, width: int = 1):
        self.call, self.inputs, self.width = call, inputs, width
        self.members = call.size // width
        self.own = self.others = own
        self.own_block = inputs.keys
        self.distances, self.last, self.is_uniform = (0,), 0, True

    @classmethod
    def around(cls, width: int, call: AttentionCall, inputs: Inputs) -> "Loop":
        """Return the hops of a ring."""
        every = distances(inputs, call.mask, width)
        own, others = hops_of(call, inputs, width, has_others=len(every) > 1)
        ring = cls(call, inputs, own, width)
        ring.others, ring.distances, ring.last = others, every, len(every) - 1
        ring.is_uniform = every == tuple(range(len(every)))
        is_kernel = gpus.are_of_mesh() and ring.others.kernels[0].name != "xla"
        ring.unrolls = is_kernel and ring.members <= _UNROLLED_RANKS
        ring.keeps_parts = ring.unrolls and rounds(ring.others)
        return ring

    @property
    def hops(self) -> tuple[Hop, ...]:
        """What the kernels are to compute."""
        has_others = self.last or self.beside is not None
        return (self.own, self.others) if has_others else (self.own,)

    def ready(self, inputs: Inputs | None = None) -> "Loop":
        """Return the same hops, with the order of all ranks' tokens.

        Args:
          inputs: of the same shapes. If None, those that are here.
        """
        loop = copy.copy(self)
        loop.inputs = (inputs or self.inputs).gathered(self.call)
        if inputs is not None:
            loop.own_block = inputs.keys
        return loop

    def unpacked(self) -> "Loop":
        """Return the same hops for kernels that take all documents."""
        loop = self.ready()
        loop.own, loop.others = map(unpacked, (self.own, self.others))
        loop.is_way = True
        return loop

    def packed(self, packing, is_alone: bool) -> "Loop":
        """Return the same hops for a kernel that takes documents packed.

        Args:
          packing: how.
          is_alone: whether nothing goes around a ring.
        """
        loop = copy.copy(self) if is_alone else self.ready()
        loop.packing, loop.is_way = packing, True
        loop.keeps_parts = self.unrolls and packing.is_pass
        if is_alone:
            loop.last = 0
        elif packing.is_pass:  # Ranks know each other's documents.
            loop.own_block = self.own_block._replace(segment_ids=None)
        return loop

    @property
    def starts_apart(self):
        """Whether a rank's own block is computed before the hops, and not as one."""
        is_packed = self.packing is not None
        return is_packed or bool(self.others.pairs.blocks) or self.unrolls

    @property
    def may_be_alone(self):
        """Whether documents may show that no rank needs the keys of another.

        On a GPU the host has to wait for the tokens, which documents are worth.
        """
        axes = self.call.axis_name
        return (
            bool(self.last)
            and self.is_uniform
            and self.width == 1
            and self.inputs.key_ids is not None
            and (compat.mesh_platform() == "cpu" or gpus.are_of_mesh())
            # Else groups of ranks might disagree, which XLA's collectives wait for.
            and compat.manual_axes()
            <= set(axes if isinstance(axes, tuple) else (axes,))
        )

    def rounded(self, x):
        """Return what is the result of a branch.

        A GPU writes it to memory. Here it has the dtype to which it is rounded anyway.
        """
        if self.is_way or (self.may_be_alone and compat.mesh_platform() != "cpu"):
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
        key, value, ids, of_keys = keep(block) if self.last else block
        return self.inputs._replace(
            key=key, value=value, key_ids=ids, key_range=of_keys
        )

    def shift(self, turn: int) -> int:
        """Return how many members further a block goes after a turn."""
        return self.distances[turn + 1] - self.distances[turn]

    def distance_at(self, turn):
        """Return that of a turn, which may be traced if the distances are 0, 1, ..."""
        return turn if self.is_uniform else self.distances[turn]

    def for_hops(self, first: int, step, carry, is_backward=False):
        """Run ``carry = step(turn, carry, shift)`` from turn ``first`` until the last.

        Backward, turns are counted from the last hop, and ``shift`` is a pair: how far
        the block goes, and how far its predecessor's gradients.
        """
        last = self.last
        turns = last - first
        # A GPU's loop writes every carry, and copies what travels; of one or no turn it
        # asks the host.
        is_flat = self.unrolls or (self.starts_apart and turns < 2)
        if is_flat or not self.is_uniform:
            for turn in range(first, last):
                shift: Any = self.shift(turn)
                if is_backward:
                    at = last - turn - 1
                    shift = self.shift(at), self.shift(at + 1)
                carry = step(turn, carry, shift)
            return carry

        def body(turn, carry):
            return step(turn, carry, (1, 1) if is_backward else 1)

        if turns >= 2:
            return jax.lax.fori_loop(first, last, body, carry)
        # XLA would inline a loop of no or one turn. Behind a barrier it stays a loop,
        # so that two ranks need the same memory as any larger ring.
        until = jax.lax.optimization_barrier(jnp.int32(last))
        return jax.lax.fori_loop(jnp.int32(first), until, body, carry)

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

    def attend(self, hop: Hop, distance, onto=None):
        """Return (out, lse) of a hop, merged with those of others, if given."""
        if self.packing is None:
            return hop_forward(hop, onto)
        if self.packing.is_pass:
            return hop_forward(self.packing.packed(hop, distance), onto)
        # What a branch returns is in memory: no more digits than are needed.
        is_last = onto is None or self.last == 1
        dtype = self.inputs.query.dtype if is_last else hop.sum_dtype

        def compute(hop):
            out, lse = hop_forward(hop, onto)
            return out.astype(dtype), lse

        def nothing():
            assert onto is not None
            return onto[0].astype(dtype), onto[1]

        out, lse = self.packing.in_a_way(compute, hop, distance, nothing)
        return out.astype(lse.dtype), lse

    def gradients(self, hop: Hop, distance, saved: Saved, onto=None) -> Grads:
        """Return what a hop adds to the gradients: see :func:`hop_backward`."""
        if self.packing is None:
            return hop_backward(hop, saved, onto)

        if self.packing.is_pass:
            hop = self.packing.packed(hop, distance)
            return hop_backward(hop, saved.with_delta(hop), onto)

        def compute(hop):
            found = hop_backward(hop, saved.with_delta(hop), onto)
            # A rank's own keys are the last: see attend. Other sums are not rounded.
            query = self.rounded(found.query) if is_own(distance) else found.query
            return found._replace(query=query)

        def nothing():
            arrays = hop.query, hop.key, hop.value
            query, *keys = (jnp.zeros_like(x, hop.sum_dtype) for x in arrays)
            return Grads(query if onto is None else onto, *keys)

        return self.packing.in_a_way(compute, hop, distance, nothing)

    def home(self, grads: Grads) -> Grads:
        """Return gradients of this rank's keys from those of the keys to begin with."""
        return grads

    def columns(self, grad_bias, distance, total=None):
        """Write the gradient of a block's columns, which no other hop has, into all."""
        if grad_bias is None:
            return None
        if total is None:
            shape = (*grad_bias.shape[:3], grad_bias.shape[3] * self.members)
            total = jnp.zeros_like(grad_bias, shape=shape)
        _, source = members_at(self.call, self.width, distance)
        start = source * grad_bias.shape[3]
        return jax.lax.dynamic_update_slice_in_dim(total, grad_bias, start, axis=3)


def is_own(distance) -> bool:
    """Say whether it is that of a rank's own keys: others may be traced."""
    return isinstance(distance, int) and not distance


def completion(arrays):
    """Return one element that depends on the kernel which computed the arrays."""
    first = jax.tree.leaves(arrays)[0]
    return first[(slice(1),) * first.ndim]
