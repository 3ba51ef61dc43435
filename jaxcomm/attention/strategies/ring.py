"""Ring: each rank keeps its queries while keys and values travel from rank to rank."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.kernel import Grads, merge
from jaxcomm.attention.kernels.primitive import hop_backward, hop_forward
from jaxcomm.attention.kernels.selection import is_flash
from jaxcomm.attention.strategies.hops import distances
from jaxcomm.attention.strategies.loop import Loop, completion
from jaxcomm.attention.strategies.packed_ring import packed_ring
from jaxcomm.attention.strategies.strategy import Cost, Strategy


@dataclasses.dataclass(frozen=True)
class Ring(Strategy):
    """One hop for each rank whose keys some rank sees.

    With h hops there are h - 1 sends forward. Backward there are h - 1 more, the other
    way round, and as many of the float32 gradients. Every send has a block to be
    computed meanwhile. The backward pass saves the last received block, not the rank's
    own: it walks the ring in reverse and ends at home. Sums are float32 throughout, so
    the error does not grow with the number of ranks.

    Source: Liu et al., Ring Attention with Blockwise Transformers, 2023.

    Attributes:
      width: how many neighbouring ranks of the axis hold one member's tokens. More than
        one below Ulysses, which has exchanged tokens and heads among them.
    """

    width: int = 1
    name = "ring"
    judges = True

    def cost(self, problem):
        sends = len(distances(problem, problem.mask, self.width)) - 1
        block = self.width * problem.block_bytes
        grads = self.width * problem.key_grad_bytes
        return Cost(
            sends,
            sends * block,
            sends * (block + grads),
            (1 + bool(sends)) * self.width * problem.key_bytes,
            overlaps=True,
            steps=2 * sends + 1,
        )

    def forward(self, call, inputs):
        ring = Loop(self.width, call, inputs)
        packed = packed_ring(ring)
        if packed is None:
            ring = Loop(self.width, call, inputs.poisoned())
            seen = ring.last_seen(ring.inputs) if ring.may_end_early else None
            (out, lse), block = self._attend(ring, seen)
            return (out.astype(lse.dtype), lse), (ring.kept(block), seen)
        (out, lse), kept = packed.forward(
            packed.look(), lambda: self._attend(ring.unpacked(), None)[0]
        )
        return (out.astype(lse.dtype), lse), (inputs, kept)

    def _attend(self, ring: Loop, seen):
        """Return (out, lse) and the last block, by hops that any kernel computes."""
        inputs, own_block = ring.inputs, ring.own_block

        def attend(block, distance, merged=None):
            return hop_forward(ring.hop(block, distance), merged)

        def in_parts(attended):
            parts = (jnp.split(x, ring.parts, axis=1) for x in attended)
            return list(zip(*parts, strict=True))

        def attend_and_merge(merged, block, distance):
            if ring.parts == 1:
                return [attend(block, distance, *merged)]
            attended = in_parts(attend(block, distance))
            return [merge(*a, *b) for a, b in zip(merged, attended, strict=True)]

        def step(turn, carry, shift):
            merged, block = carry
            arriving = ring.start(block, shift)
            merged = attend_and_merge(
                merged, ring.then(arriving, block), ring.distance_at(turn)
            )
            return merged, ring.done(arriving, after=[lse for _, lse in merged])

        def own():
            out, lse = attend(own_block, 0)
            return (ring.rounded(out), lse), own_block

        def around(last):
            block = own_block
            if ring.starts_apart:
                # Outside the loop: there is nothing to merge with or to choose.
                arriving = ring.start(block, ring.shift(0))
                attended = attend(ring.then(arriving, block), 0)
                after = attended[1]
                if is_flash(ring.own):  # Of that the dimensions would be moved.
                    after = attended[0].astype(inputs.query.dtype)
                block = ring.done(arriving, after=after)
                first = 1
            else:
                shape = (*inputs.query.shape[:3], inputs.value.shape[3])
                dtype = ring.own.sum_dtype
                out = jnp.zeros_like(inputs.query, dtype, shape=shape)
                attended = out, jnp.full_like(out[..., 0], -jnp.inf)
                first = 0
            carry = in_parts(attended), block
            merged, block = ring.for_hops(first, last, step, carry)
            # The last hop is outside the loop: it computes and sends nothing.
            merged = attend_and_merge(merged, block, ring.distance_at(last))
            outs, lses = zip(*merged, strict=True)
            out, lse = (jnp.concatenate(each, 1) for each in (outs, lses))
            return (ring.rounded(out), lse), block

        return ring.go(around, own, seen)

    def backward(self, call, kept, saved):
        """Go through the hops from the last to the first, with the block that is here.

        So a rank's own block comes last: while it is computed its gradients come home.

        Source: NVIDIA, TransformerEngine, context parallelism, 2024.
        """
        kept, seen = kept
        ring = Loop(self.width, call, kept)
        if ring.last:
            # Not earlier: the sends of the way forward are still on their way.
            block, lse = jax.lax.optimization_barrier((ring.own_block, saved.lse))
            ring.own_block, saved = block, saved._replace(lse=lse)
        packed = packed_ring(ring)
        if packed is None:
            found = self._differentiate(ring, saved, seen)
        else:
            found = packed.backward(
                seen,
                saved,
                lambda last: self._differentiate(ring.unpacked(last), saved, None),
            )
        return jax.tree.map(lambda x: x.astype(ring.own.sum_dtype), found)

    def _differentiate(self, ring: Loop, saved, seen):
        kept_block = ring.own_block
        if ring.is_unpacked:
            saved = saved.with_delta(ring.own)

        def gradients(block, distance, total=None):
            """Return those that stay, of queries, bias and slopes; and the block's."""
            hop = ring.hop(block, distance)
            if total is None:
                found = hop_backward(hop, saved)
                bias, slopes = ring.columns(found.bias, distance), found.slopes
            else:
                found = hop_backward(hop, saved, total.query)
                bias = ring.add_columns(total.bias, found.bias, distance)
                slopes = jax.tree.map(jnp.add, total.slopes, found.slopes)
            of_rank = Grads(found.query, None, None, bias, slopes)
            return of_rank, (found.key, found.value)

        def own():
            of_rank, (key, value) = gradients(kept_block, 0)
            return result(of_rank, key, value)

        def around(last):
            arriving = ring.start(kept_block, -ring.shift(ring.last - 1))
            of_rank, grad_block = gradients(
                ring.then(arriving, kept_block), ring.distance_at(last)
            )
            block = ring.done(arriving, after=completion(grad_block))
            carry = of_rank, grad_block, block
            step = functools.partial(step_to, last)
            carry = ring.for_hops(1, last, step, carry, is_backward=True)
            of_rank, grad_block, block = carry
            if ring.last == 1 and is_flash(ring.others):
                # They are the kernel's, which rounds, and nothing was added.
                grad_block = jax.tree.map(
                    lambda x: x.astype(ring.inputs.query.dtype), grad_block
                )
            following = ring.start(grad_block, -ring.shift(0))
            of_rank, added = gradients(
                ring.then(following, block),
                0,
                of_rank,
            )
            following = ring.done(following, after=completion(added))
            following = jax.tree.map(lambda x, y: x.astype(y.dtype), following, added)
            key, value = jax.tree.map(jnp.add, following, added)
            return result(of_rank, key, value)

        def result(of_rank, key, value):
            query, key, value = map(ring.rounded, (of_rank.query, key, value))
            return of_rank._replace(query=query, key=key, value=value)

        def step_to(last, turn, carry, shift):
            of_rank, grad_block, block = carry
            # The gradients of a block follow the block one hop behind.
            arriving = ring.start_pair(block, grad_block, *(-by for by in shift))
            of_rank, added = gradients(
                ring.then(arriving, block), ring.distance_at(last - turn), of_rank
            )
            block, following = ring.done(arriving, after=completion(added))
            return of_rank, jax.tree.map(jnp.add, following, added), block

        return ring.go(around, own, seen)
