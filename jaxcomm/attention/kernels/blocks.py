"""Hops by a kernel that has no masks from positions: one rectangle each."""

import abc
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.choice import Choice
from jaxcomm.attention.kernels.delta import with_delta
from jaxcomm.attention.kernels.hop import Grads, Hop
from jaxcomm.attention.kernels.kernel import Kernel
from jaxcomm.attention.schedules.block import Block


class BlockKernel(Kernel):
    """A kernel that computes a :class:`Block`, and its own ``delta``.

    Where a hop is one of several blocks, the device chooses when it runs.
    """

    by_blocks = True

    @abc.abstractmethod
    def attend(self, hop: Hop, block: Block, query, key, value) -> tuple[Any, Any]:
        """Attend in a block that is not empty.

        Args:
          hop: of which it is a block.
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
          hop, block: as above.
          arrays: query, key and value of the block.
          out, lse, grad_out: (B, rows, N, V), (B, N, rows) and (B, rows, N, V), over
            the keys of all hops. The sum of ``grad_out * out`` is the kernel's to make.
        """

    def forward(self, hop):
        query, value = hop.query, hop.value
        # Else XLA would cut the tiles of all hops before the first, and keep them.
        key, block = jax.lax.optimization_barrier((hop.key, hop.block))
        hop = hop.replace(key=key, block=block)

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

        def of_tile(*tile):
            whole = Block((0, tile[0].shape[1]), (0, tile[1].shape[1]))
            out, lse = self.attend(hop, whole, *tile)
            return out.astype(lse.dtype), jnp.moveaxis(lse, 2, 1)

        def skip():
            out = jnp.zeros_like(query, shape=(*query.shape[:3], value.shape[3]))
            return out, jnp.full(query.shape[:3], -jnp.inf, hop.sum_dtype)

        choice = None
        if hop.queries.segment_ids is None:  # A tile's numbers are its own.
            choice = Choice.of(hop.blocks, query.shape[1], key.shape[1])
        if choice is None:
            out, lse = _choose(hop, compute, skip)
        else:
            at = hop.block == 1
            tiles = (
                choice.queries(query, at),
                choice.keys(key, at),
                choice.keys(value, at),
            )
            attended = [of_tile(*tile) for tile in zip(*tiles, strict=True)]
            out, lse = choice.merge(attended, query.shape[1], at)
        # Outside of the branches: what a branch returns is written to memory.
        return out.astype(lse.dtype), lse

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
        cut = {block: of_queries(block) for block in hop.blocks}

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
    """Compute the block of a hop, of several by a branch.

    Args:
      hop: which blocks there are, and which it is.
      compute: of a block.
      skip: returns what an empty block gives.
    """

    def branch(block: Block):
        return skip if block.is_empty else lambda: compute(block)

    branches = [branch(block) for block in hop.blocks]
    return branches[0]() if len(branches) == 1 else jax.lax.switch(hop.block, branches)


def _embed(x, within: tuple[int, int], length: int, fill: float = 0):
    """Put (B, length of within, ...) into (B, length, ...)."""
    padding = [(0, 0)] * x.ndim
    padding[1] = (within[0], length - within[1])
    return jnp.pad(x, padding, constant_values=fill)
