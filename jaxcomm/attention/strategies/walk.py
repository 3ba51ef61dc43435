"""One pass: over a rank's own keys, then those of others; and backward, from the last.

Every strategy but Ulysses is such a pass, and Ulysses has one inside. A strategy says
what its hops are: a ``Loop``. Those of the ring go around all ranks. The files of a
pass, in their order:

* ``on_ranks``: the arrays and options of a call, and its ``custom_vjp``.
* This file: which hop follows which, and where results are added up.
* ``loop``: what is sent when. ``hops``: what is known of hops before a program runs.
* ``packing``: where documents begin. ``beside``: keys of others, in one call.
* ``kernels/primitive``: a hop. ``kernels/selection``: which kernel computes it.

An example: of four tokens, in zigzag, rank 0 holds the first and the last.

>>> from jaxcomm.attention.kernels.kernel import Hop
>>> from jaxcomm.attention.kernels.primitive import hop_forward
>>> from jaxcomm.attention.kernels.scores import Scores
>>> from jaxcomm.attention.kernels.selection import KERNELS
>>> from jaxcomm.attention.mask import Coordinates, Mask
>>> from jaxcomm.attention.pairs import Pairs
>>> held = [jaxcomm.Layout("zigzag", 2, 4).positions_of(rank) for rank in (0, 1)]
>>> [at.tolist() for at in held]
[[0, 3], [1, 2]]

It has two hops: over its own keys, then over those that rank 1 sends. Positions say
which keys a query sees. The first token sees none of rank 1:

>>> causal = Mask(left=None, right=0, query_length=4, key_length=4)
>>> parts = (1, 1), (1, 1)  # of queries and of keys: an early and a late one
>>> own, others = (
...     Pairs(causal, Coordinates(held[0]), Coordinates(at), parts) for at in held
... )
>>> own.allowed()[0].astype(int).tolist(), others.allowed()[0].astype(int).tolist()
([[1, 0], [1, 1]], [[0, 0], [1, 1]])

Each hop gives means of values, and logarithms of the sums of weights. All weights are 1
here, and the values of the tokens are 1, 2, 4 and 8:

>>> zeros, values = jnp.zeros((1, 2, 1, 8)), jnp.array([1.0, 2.0, 4.0, 8.0])
>>> def hop(pairs, at):
...     value = values[at].reshape(1, 2, 1, 1)
...     return Hop(Scores(1.0), pairs, zeros, zeros, value, kernels=KERNELS)
>>> found = [hop_forward(hop(*each)) for each in zip((own, others), held)]
>>> [(out.ravel().tolist(), jnp.exp(lse).ravel().tolist()) for out, lse in found]
[([1.0, 4.5], [1.0, 2.0]), ([0.0, 3.0], [0.0, 2.0])]

Merged, the last token has the mean of all four values:

>>> merge(*found)[0].ravel().tolist()
[1.0, 3.75]
"""

import abc
import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.kernel import Grads, merge
from jaxcomm.attention.strategies.hops import distances
from jaxcomm.attention.strategies.loop import Loop
from jaxcomm.attention.strategies.packing import packed_of
from jaxcomm.attention.strategies.strategy import AttentionCall, Cost, Inputs, Strategy
from jaxcomm.collectives.all_reduce import psum

# Entries of a table of documents, over the rows of a batch.
_TABLE = 4096


class Walk(Strategy):
    """A strategy whose pass is hops over keys, by any kernel or with documents packed.

    What is kept for the way back is no larger than the inputs.
    """

    judges = True

    @abc.abstractmethod
    def loop(self, call: AttentionCall, inputs: Inputs) -> Loop:
        """Return the hops of a pass."""

    def forward(self, call, inputs):
        loop = self.loop(call, inputs)
        packed = packed_of(loop)
        if packed is None:
            loop = loop.ready(loop.inputs.poisoned())
            shared = None
            if loop.may_be_alone:
                shared = _share_documents(call, loop.inputs)
            (out, lse), block = _attend(loop, shared)
            return (out.astype(lse.dtype), lse), (loop.kept(block), shared)
        found = packed.look()
        out, lse = packed.forward(found, lambda loop: _attend(loop)[0])
        return (out.astype(lse.dtype), lse), (loop.inputs, found)

    def backward(self, call, kept, saved):
        """Go through the hops from the last to the first, with the block that is here.

        So a rank's own block comes last: while it is computed its gradients come home.

        Source: NVIDIA, TransformerEngine, context parallelism, 2024.
        """
        kept, found = kept
        loop = self.loop(call, kept)
        if loop.last:
            # Not earlier: the sends of the way forward are still on their way.
            block, lse = jax.lax.optimization_barrier((loop.own_block, saved.lse))
            loop.own_block, saved = block, saved._replace(lse=lse)
        packed = packed_of(loop)
        if packed is None:
            grads = _differentiate(loop.ready(), saved, found)
        else:
            grads = packed.backward(found, saved, _differentiate)
        return loop.home(jax.tree.map(lambda x: x.astype(saved.lse.dtype), grads))


@dataclasses.dataclass(frozen=True)
class Ring(Walk):
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

    def loop(self, call, inputs):
        return Loop.around(self.width, call, inputs)


def _share_documents(call: AttentionCall, inputs: Inputs) -> jax.Array:
    """Return whether two ranks may have tokens of one document, the same on all ranks.

    It costs a sum of 16 KiB. Documents of a row whose numbers differ by a multiple of
    some thousand count as one.
    """
    batch = inputs.query.shape[0]
    of_row = max(_TABLE // batch, 256)
    held = jnp.zeros(batch * of_row, jnp.int32)
    for ids in (inputs.query_ids, inputs.key_ids):
        row = jax.lax.broadcasted_iota(jnp.int32, ids.shape, 0)
        # Padding is of no document: out of bounds, and dropped.
        at = jnp.where(ids < 0, held.size, row * of_row + ids % of_row)
        held = held.at[at.reshape(-1)].set(1, mode="drop")
    return (psum(held, call.axis_name) > 1).any()


_sum = functools.partial(functools.reduce, jnp.add)


def _go(loop: Loop, around, own, shared):
    """Return ``around()``, or ``own()`` if a rank's own keys are all that it sees.

    Args:
      shared: traced, whether ranks see keys of each other; or None if they do.
    """
    if not loop.last:
        return own()
    return around() if shared is None else jax.lax.cond(shared, around, own)


def _attend(loop: Loop, shared=None):
    """Return (out, lse) and the last block."""
    inputs, own_block = loop.inputs, loop.own_block

    def attend(parts, block, distance):
        hop = loop.hop(block, distance)
        if parts and not loop.keeps_parts:
            return [loop.attend(hop, distance, parts[0])]
        parts = [*parts, loop.attend(hop, distance)]
        return loop.few(parts, lambda parts: merge(*parts))

    def step(turn, carry, shift):
        parts, block = carry
        arriving = loop.start(block, shift)
        parts = attend(parts, loop.then(arriving, block), loop.distance_at(turn))
        return parts, loop.done(arriving, after=loop.written(*parts[-1]))

    def own():
        if loop.beside is not None:
            return loop.beside.attend(loop), own_block
        ((out, lse),) = attend([], own_block, 0)
        return (loop.rounded(out), lse), own_block

    def around():
        if loop.starts_apart:
            # Outside the loop: there is nothing to merge with or to choose.
            carry, first = step(0, ([], own_block), loop.shift(0)), 1
        else:
            shape = (*inputs.query.shape[:3], inputs.value.shape[3])
            out = jnp.zeros_like(inputs.query, loop.own.sum_dtype, shape=shape)
            carry = [(out, jnp.full_like(out[..., 0], -jnp.inf))], own_block
            first = 0
        parts, block = loop.for_hops(first, step, carry)
        # The last hop is outside the loop: it computes and sends nothing.
        parts = attend(parts, block, loop.distance_at(loop.last))
        out, lse = parts[0] if len(parts) == 1 else merge(*parts)
        return (loop.rounded(out), lse), block

    return _go(loop, around, own, shared)


def _differentiate(loop: Loop, saved, shared=None):
    """Return the gradients, in their dtype if it is a way of a pass."""
    own_block, last = loop.own_block, loop.last
    if loop.is_way and loop.packing is None:
        saved = saved.with_delta(loop.own)

    def gradients(total, block, distance):
        """Return the sums that stay, and the gradients of the block.

        Args:
          total: the sums so far, or None; those of the queries are a list.
        """
        before, onto, hop = [], None, loop.hop(block, distance)
        if total is not None and loop.keeps_parts:
            before = total.query
        elif total is not None:
            (onto,) = total.query
        found = loop.gradients(hop, distance, saved, onto)
        query, slopes = loop.few([*before, found.query], _sum), found.slopes
        if total is not None:
            slopes = jax.tree.map(jnp.add, total.slopes, slopes)
        bias = loop.columns(found.bias, distance, total and total.bias)
        return Grads(query, None, None, bias, slopes), (found.key, found.value)

    def own():
        if loop.beside is not None:
            return loop.beside.differentiate(loop, saved)
        total, (key, value) = gradients(None, own_block, 0)
        return result(total, key, value)

    def around():
        block = loop.last_block()
        if loop.is_way and last == 1:  # What would come is here.
            total, grads = gradients(None, block, loop.distance_at(last))
        else:
            arriving = loop.start(block, -loop.shift(last - 1))
            block = loop.then(arriving, block)
            total, grads = gradients(None, block, loop.distance_at(last))
            block = loop.done(arriving, after=loop.written(*grads))
        if loop.keeps_parts:
            # They are the kernel's, which rounds, and nothing was added.
            grads = tuple(x.astype(loop.inputs.query.dtype) for x in grads)
        carry = total, grads, block
        total, grads, block = loop.for_hops(1, step, carry, is_backward=True)
        block = own_block if loop.is_way else block
        following = loop.start(grads, -loop.shift(0))
        total, added = gradients(total, loop.then(following, block), 0)
        following = loop.done(following, after=loop.written(*added))
        return result(total, *sums(following, added))

    def sums(following, added):
        pairs = zip(following, added, strict=True)
        return tuple(x.astype(y.dtype) + y for x, y in pairs)

    def result(total, key, value):
        query, key, value = map(loop.rounded, (_sum(total.query), key, value))
        return total._replace(query=query, key=key, value=value)

    def step(turn, carry, shift):
        total, grads, block = carry
        # The gradients of a block follow the block one hop behind.
        arriving = loop.start_pair(block, grads, *(-by for by in shift))
        block = loop.then(arriving, block)
        total, added = gradients(total, block, loop.distance_at(last - turn))
        block, following = loop.done(arriving, after=loop.written(*added))
        return total, loop.as_one(sums(following, added)), block

    return _go(loop, around, own, shared)
