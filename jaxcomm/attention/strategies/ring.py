"""Ring: each rank keeps its queries while keys and values travel from rank to rank."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.kernel import Grads, merge
from jaxcomm.attention.strategies.hops import distances
from jaxcomm.attention.strategies.loop import Loop
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
            hops=sends,
        )

    def forward(self, call, inputs):
        ring = Loop(self.width, call, inputs)
        packed = packed_ring(ring)
        if packed is None:
            ring = ring.gathered(inputs.poisoned())
            seen = ring.last_seen(ring.inputs) if ring.may_end_early else None
            (out, lse), block = self._attend(ring, seen)
            return (out.astype(lse.dtype), lse), (ring.kept(block), seen)
        found = packed.look()
        out, lse = packed.forward(found, lambda ring: self._attend(ring, None)[0])
        return (out.astype(lse.dtype), lse), (inputs, found)

    def _attend(self, ring: Loop, seen):
        """Return (out, lse) and the last block, by hops that any kernel computes."""
        inputs, own_block = ring.inputs, ring.own_block

        def attend(parts, block, distance):
            if parts and not ring.keeps_parts:
                return [ring.attend(block, distance, parts[0])]
            parts = [*parts, ring.attend(block, distance)]
            return ring.few(parts, lambda parts: merge(*parts))

        def step(turn, carry, shift):
            parts, block = carry
            arriving = ring.start(block, shift)
            parts = attend(parts, ring.then(arriving, block), ring.distance_at(turn))
            return parts, ring.done(arriving, after=ring.written(*parts[-1]))

        def own():
            ((out, lse),) = attend([], own_block, 0)
            return (ring.rounded(out), lse), own_block

        def around(last):
            if ring.starts_apart:
                # Outside the loop: there is nothing to merge with or to choose.
                carry, first = step(0, ([], own_block), ring.shift(0)), 1
            else:
                shape = (*inputs.query.shape[:3], inputs.value.shape[3])
                dtype = ring.own.sum_dtype
                out = jnp.zeros_like(inputs.query, dtype, shape=shape)
                carry = [(out, jnp.full_like(out[..., 0], -jnp.inf))], own_block
                first = 0
            parts, block = ring.for_hops(first, last, step, carry)
            # The last hop is outside the loop: it computes and sends nothing.
            parts = attend(parts, block, ring.distance_at(last))
            out, lse = parts[0] if len(parts) == 1 else merge(*parts)
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
            found = packed.backward(seen, saved, self._differentiate)
        return jax.tree.map(lambda x: x.astype(ring.own.sum_dtype), found)

    def _differentiate(self, ring: Loop, saved, seen=None):
        own_block = ring.own_block
        if ring.is_way and ring.packing is None:
            saved = saved.with_delta(ring.own)

        def gradients(total, block, distance):
            """Return the sums that stay, and the gradients of the block.

            Args:
              total: the sums so far, or None; those of the queries are a list.
            """
            if total is None:
                found = ring.gradients(block, distance, saved)
                query, slopes = [found.query], found.slopes
                bias = ring.columns(found.bias, distance)
            else:
                onto = None if ring.keeps_parts else total.query[0]
                found = ring.gradients(block, distance, saved, onto)
                before = total.query if ring.keeps_parts else []
                query = ring.few([*before, found.query], sum)
                bias = ring.add_columns(total.bias, found.bias, distance)
                slopes = jax.tree.map(jnp.add, total.slopes, found.slopes)
            return Grads(query, None, None, bias, slopes), (found.key, found.value)

        def own():
            total, (key, value) = gradients(None, own_block, 0)
            return result(total, key, value)

        def around(last):
            block = ring.last_block()
            if ring.is_way and ring.last == 1:  # What would come is here.
                total, grads = gradients(None, block, ring.distance_at(last))
            else:
                arriving = ring.start(block, -ring.shift(ring.last - 1))
                block = ring.then(arriving, block)
                total, grads = gradients(None, block, ring.distance_at(last))
                block = ring.done(arriving, after=ring.written(*grads))
            if ring.keeps_parts:
                # They are the kernel's, which rounds, and nothing was added.
                grads = tuple(x.astype(ring.inputs.query.dtype) for x in grads)
            carry = total, grads, block
            step = functools.partial(step_to, last)
            total, grads, block = ring.for_hops(1, last, step, carry, is_backward=True)
            block = own_block if ring.is_way else block
            following = ring.start(grads, -ring.shift(0))
            total, added = gradients(total, ring.then(following, block), 0)
            following = ring.done(following, after=ring.written(*added))
            return result(total, *sums(following, added))

        def sums(following, added):
            pairs = zip(following, added, strict=True)
            return tuple(x.astype(y.dtype) + y for x, y in pairs)

        def result(total, key, value):
            query, key, value = map(ring.rounded, (sum(total.query), key, value))
            return total._replace(query=query, key=key, value=value)

        def step_to(last, turn, carry, shift):
            total, grads, block = carry
            # The gradients of a block follow the block one hop behind.
            arriving = ring.start_pair(block, grads, *(-by for by in shift))
            block = ring.then(arriving, block)
            total, added = gradients(total, block, ring.distance_at(last - turn))
            block, following = ring.done(arriving, after=ring.written(*added))
            return total, ring.as_one(sums(following, added)), block

        return ring.go(around, own, seen)
