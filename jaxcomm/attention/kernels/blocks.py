"""Hops by a kernel that has no masks from positions: one rectangle each."""

import abc
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.kernel import Grads, Hop, Kernel, merge
from jaxcomm.attention.pairs import Block

# The units of the parts of a float32 number, whose range is beyond float16's.
_PARTS = (2.0**10, 1.0, 2.0**-10, 2.0**-20)
# By how many columns heads grow. Kernels take head sizes that are multiples of it.
COLUMNS = 8


def with_delta(query, key, value, out, grad_out, delta):
    """Extend the heads so that a kernel subtracts ``delta`` and not its own.

    The gradient of a score is weight * (grad_out . value - out . grad_out), and its
    last term lacks the gradient of lse. So out becomes 0, and columns join the heads
    whose product is -delta, in parts, as one number of the short dtype would round it.
    Query and key have 0 there, and do not notice.
    """
    info = jnp.finfo(query.dtype)
    parts, rest = [], delta
    for unit in _PARTS:
        # Unlike a cast to and fro, XLA may not drop it.
        part = jax.lax.reduce_precision(rest / unit, info.nexp, info.nmant)
        parts.append(-part)
        rest = rest - part * unit
    columns = jnp.stack(parts, -1).astype(grad_out.dtype)
    units = jnp.asarray(_PARTS, value.dtype).reshape(*[1] * (value.ndim - 1), -1)

    def extend(x, columns):
        padding = [(0, 0)] * (x.ndim - 1) + [(0, COLUMNS - columns.shape[-1])]
        return jnp.concatenate([x, jnp.pad(columns, padding)], -1)

    def zeros(x):
        return jnp.zeros_like(x[..., : columns.shape[-1]])

    return (
        extend(query, zeros(query)),
        extend(key, zeros(key)),
        extend(value, zeros(value) + units),
        extend(jnp.zeros_like(out), zeros(out)),
        extend(grad_out, columns),
    )


def are_halves(blocks: tuple[Block, ...], queries: int, keys: int) -> bool:
    """Say whether blocks are all queries and early keys, or late queries and all keys.

    Half of them each, as in a zigzag of even length.

    >>> are_halves((Block((0, 4), (0, 2)), Block((2, 4), (0, 4))), 4, 4)
    True
    """
    if queries % 2 or keys % 2:
        return False
    all_queries, all_keys = (0, queries), (0, keys)
    earlier = Block(all_queries, (0, keys // 2))
    return blocks == (earlier, Block((queries // 2, queries), all_keys))


class BlockKernel(Kernel):
    """A kernel that computes a :class:`Block`, and its own ``delta``.

    Where a hop is one of several blocks, the device chooses when it runs.
    """

    by_blocks = True
    rounds = True

    @abc.abstractmethod
    def attend(self, hop: Hop, block: Block, query, key, value) -> tuple[Any, Any]:
        """Attend in a block that is not empty.

        Args:
          block: what the queries see of the keys.
          query, key, value: (B, rows, N, D), (B, columns, K, D), (B, columns, K, V), of
            the block.

        Returns:
          (out, lse): (B, rows, N, V), and float32 (B, N, rows).
        """

    @abc.abstractmethod
    def gradients(self, hop: Hop, block: Block, arrays, out, lse, grad_out) -> tuple:
        """Return the gradients of query, key and value of a block, in their shapes.

        Args:
          arrays: query, key and value of the block.
          out, lse, grad_out: (B, rows, N, V), (B, N, rows) and (B, rows, N, V), over
            the keys of all hops. The sum of ``grad_out * out`` is the kernel's to make.
        """

    def forward(self, hop):
        query, value = hop.query, hop.value
        # Else XLA would cut the tiles of all hops before the first, and keep them.
        key, block = jax.lax.optimization_barrier((hop.key, hop.pairs.block))
        hop = hop.replace(key=key).with_pairs(block=block)

        def compute(block: Block):
            rows, columns = slice(*block.queries), slice(*block.keys)
            arrays = query[:, rows], key[:, columns], value[:, columns]
            out, lse = self.attend(hop, block, *arrays)
            return (
                _embed(out, block.queries, query.shape[1]),
                _embed(
                    jnp.moveaxis(lse, 2, 1), block.queries, query.shape[1], -jnp.inf
                ),
            )

        def skip():
            out = jnp.zeros_like(query, shape=(*query.shape[:3], value.shape[3]))
            return out, jnp.full(query.shape[:3], -jnp.inf, hop.sum_dtype)

        has_halves = are_halves(hop.pairs.blocks, query.shape[1], key.shape[1])
        if has_halves and hop.pairs.queries.segment_ids is None:
            out, lse = self._in_halves(hop)
        else:
            out, lse = _choose(hop, compute, skip)
        # Outside of the branches: what a branch returns is written to memory.
        return out.astype(lse.dtype), lse

    def _in_halves(self, hop: Hop):
        """Return (out, lse) of a hop whose blocks :func:`are_halves`, without a branch.

        At a branch a GPU's host waits for all that was begun before, to ask which way
        to go. Both blocks have the quarter of late queries and early keys. The other
        lies on the diagonal, and here the choice is only which part is read for it.
        """
        is_late, half = hop.pairs.block == 1, hop.query.shape[1] // 2
        half_keys = hop.key.shape[1] // 2
        block = Block((0, half), (0, half_keys))

        def of_quarter(row, column):
            pairs = (hop.query, row), (hop.key, column), (hop.value, column)
            parts = (
                jax.lax.dynamic_slice_in_dim(x, at, x.shape[1] // 2, axis=1)
                for x, at in pairs
            )
            out, lse = self.attend(hop, block, *parts)
            return out.astype(lse.dtype), jnp.moveaxis(lse, 2, 1)

        def only_if(flag, out, lse):
            return jnp.where(flag, out, 0), jnp.where(flag, lse, -jnp.inf)

        which = jnp.where(is_late, 1, 0)
        diagonal = of_quarter(half * which, half_keys * which)
        shared = of_quarter(half, 0)
        early = merge(only_if(~is_late, *diagonal))
        late = merge(only_if(is_late, *diagonal), shared)
        return (jnp.concatenate(each, 1) for each in zip(early, late, strict=True))

    def backward(self, hop, saved):
        grad_out, out, lse, delta = saved
        given = hop.query, hop.key, hop.value
        sizes = [x.shape[3] for x in given]
        query, key, value = given
        if hop.has_residual:
            *given, out, grad_out = with_delta(*given, out, grad_out, delta)
            query, key, value = given

        def of_queries(block: Block):
            rows = slice(*block.queries)
            heads_first = jnp.moveaxis(lse[:, rows], 2, 1)
            return query[:, rows], out[:, rows], heads_first, grad_out[:, rows]

        # Outside of the branches: the hops of a ring share them.
        cut = {block: of_queries(block) for block in hop.pairs.blocks}

        def compute(block: Block):
            columns = slice(*block.keys)
            rows, *of_rows = cut[block]
            arrays = rows, key[:, columns], value[:, columns]
            grads = self.gradients(hop, block, arrays, *of_rows)
            within = block.queries, block.keys, block.keys
            return tuple(
                _embed(grad[..., :size], at, x.shape[1])
                for grad, size, at, x in zip(grads, sizes, within, given, strict=True)
            )

        def skip():
            return tuple(
                jnp.zeros_like(x[..., :n]) for x, n in zip(given, sizes, strict=True)
            )

        # Tiles would cost more here than the branch: their gradients are summed apart.
        return Grads(*(grad.astype(lse.dtype) for grad in _choose(hop, compute, skip)))


def _choose(hop: Hop, compute, skip):
    """Compute the block of a hop, of several by a branch."""

    def branch(block: Block):
        return skip if block.is_empty else lambda: compute(block)

    branches = [branch(block) for block in hop.pairs.blocks]
    if len(branches) == 1:
        return branches[0]()
    return jax.lax.switch(hop.pairs.block, branches)


def _embed(x, within: tuple[int, int], length: int, fill: float = 0):
    """Put (B, length of within, ...) into (B, length, ...)."""
    padding = [(0, 0)] * x.ndim
    padding[1] = (within[0], length - within[1])
    return jnp.pad(x, padding, constant_values=fill)
