"""Two blocks to choose from without a branch.

At a branch a GPU's host waits for all that was begun before, to ask which way to go.
Where both ways are as many tiles of one shape, the choice is only which part of the
arrays a tile reads: the same kernels compute the one block or the other.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxcomm.attention.merge import merge
from jaxcomm.attention.schedules.block import Block


@dataclasses.dataclass(frozen=True)
class Choice:
    """Two blocks as equally many tiles of one shape.

    Attributes:
      shape: how many queries and how many keys a tile has.
      first, second: which tile of the queries and which of the keys each is, in the
        first block and in the second.
    """

    shape: tuple[int, int]
    first: tuple[tuple[int, int], ...]
    second: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, blocks: tuple[Block, ...], queries: int, keys: int) -> "Choice | None":
        """Return the choice between two blocks, or None if there is no such choice.

        Args:
          blocks: the blocks.
          queries, keys: how many there are.

        >>> Choice.of((Block((0, 4), (0, 2)), Block((2, 4), (0, 4))), 4, 4)
        Choice(shape=(2, 2), first=((0, 0), (1, 0)), second=((1, 1), (1, 0)))
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
          x: the array.
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
          length: T, how many queries there are.
          is_second: as above.

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
            return functools.reduce(lambda a, b: merge(*a, *b), found)

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
