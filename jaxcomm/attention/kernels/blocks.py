"""Hops by a kernel that has no masks from positions: one rectangle each."""

import abc
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm.attention.kernels.kernel import Grads, Hop, Kernel, merge
from jaxcomm.attention.mask import Block

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


@dataclasses.dataclass(frozen=True)
class BlockPair:
    """Two blocks as equally many tiles of one shape, to choose without a branch.

    At a branch a GPU's host waits for all that was begun before, to ask which way to
    go. Here the choice is only which part of the arrays a tile reads: the same kernels
    compute the one block or the other.

    Attributes:
      shape: how many queries and how many keys a tile has.
      first, second: which tile of the queries and which of the keys each is, in the
        first block and in the second.
    """

    shape: tuple[int, int]
    first: tuple[tuple[int, int], ...]
    second: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls, blocks: tuple[Block, ...], queries: int, keys: int
    ) -> "BlockPair | None":
        """Return the choice between two blocks, or None if there is no such choice.

        >>> BlockPair.of((Block((0, 4), (0, 2)), Block((2, 4), (0, 4))), 4, 4)
        BlockPair(shape=(2, 2), first=((0, 0), (1, 0)), second=((1, 1), (1, 0)))
        """
        if len(blocks) != 2 or any(not b.is_whole or b.is_empty for b in blocks):
            return None
        rows, columns = map(min, *(block.shape for block in blocks))
        edges = [queries, *(edge for block in blocks for edge in block.queries)]
        key_edges = [keys, *(edge for block in blocks for edge in block.keys)]
        if any(x % rows for x in edges) or any(x % columns for x in key_edges):
            return None
        first, second = (
            [
                (query // rows, key // columns)
                for query in range(*block.queries, rows)
                for key in range(*block.keys, columns)
            ]
            for block in blocks
        )
        if len(first) != len(second):
            return None
        # A tile of both is at one place in both: there is nothing to choose.
        others = iter([tile for tile in second if tile not in first])
        second = [tile if tile in second else next(others) for tile in first]
        return cls((rows, columns), tuple(first), tuple(second))

    def queries(self, x, is_second):
        """Return (B, rows, ...) of (B, T, ...), for each tile of the chosen block.

        Args:
          is_second: traced bool, whether it is the second.
        """
        return self._cut(x, 0, is_second)

    def keys(self, x, is_second):
        """Return (B, columns, ...) of (B, S, ...), likewise."""
        return self._cut(x, 1, is_second)

    def merge(self, attended, length: int, is_second):
        """Merge what the tiles' queries saw into what all of them saw.

        Args:
          attended: of each tile (out, lse), (B, rows, N, D) and (B, rows, N) float32.

        Returns:
          (B, T, N, D) and (B, T, N); queries of no tile give 0 and -inf.
        """
        nothing = 0, -jnp.inf

        def part(place):
            found = []
            for tile, *places in zip(attended, self.first, self.second, strict=True):
                rows = [row for row, _ in places]
                if place not in rows:
                    continue
                if rows[0] != rows[1]:
                    is_here = is_second == (rows[1] == place)
                    choose = functools.partial(jnp.where, is_here)
                    tile = tuple(map(choose, tile, nothing))
                found.append(tile)
            if not found:
                return tuple(map(jnp.full_like, attended[0], nothing))
            return merge(*found)

        parts = [part(place) for place in range(length // self.shape[0])]
        outs, lses = zip(*parts, strict=True)
        return jnp.concatenate(outs, 1), jnp.concatenate(lses, 1)

    def _cut(self, x, axis: int, is_second):
        size = self.shape[axis]

        def start(first, second):
            # Where a tile does not move, XLA is told so.
            return size * (first if first == second else chosen(first, second))

        def chosen(first, second):
            return jnp.where(is_second, second, first)

        return [
            jax.lax.dynamic_slice_in_dim(x, start(a[axis], b[axis]), size, axis=1)
            for a, b in zip(self.first, self.second, strict=True)
        ]


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
            choice = BlockPair.of(hop.blocks, query.shape[1], key.shape[1])
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
    """Compute the block of a hop, of several by a branch."""

    def branch(block: Block):
        return skip if block.is_empty else lambda: compute(block)

    branches = [branch(block) for block in hop.blocks]
    return branches[0]() if len(branches) == 1 else jax.lax.switch(hop.block, branches)


def _embed(x, within: tuple[int, int], length: int, fill: float = 0):
    """Put (B, length of within, ...) into (B, length, ...)."""
    padding = [(0, 0)] * x.ndim
    padding[1] = (within[0], length - within[1])
    return jnp.pad(x, padding, constant_values=fill)
