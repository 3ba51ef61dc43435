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
class Cut:
    """Parts of an axis, in tiles' order.

    Attributes:
      size: of a part, and the axis is whole parts.
      first, second: which part each tile holds, in the first block and in the second.
    """

    size: int
    first: tuple[int, ...]
    second: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Two blocks as tiles: what they hold of the queries, and what of the keys."""

    queries: Cut
    keys: Cut


def common_tiling(
    first: Block, second: Block, queries: int, keys: int
) -> Tiling | None:
    """Return two blocks as equally many tiles of one shape, or None if they are not.

    Args:
      first, second: the blocks.
      queries, keys: how many there are.

    >>> common_tiling(Block((0, 4), (0, 2)), Block((2, 4), (0, 4)), 4, 4).queries
    Cut(size=2, first=(0, 1), second=(1, 1))
    """
    blocks = first, second
    if any(block.is_causal or block.is_empty for block in blocks):
        return None
    rows = min(stop - start for start, stop in (block.queries for block in blocks))
    columns = min(stop - start for start, stop in (block.keys for block in blocks))
    if any(edge % rows for edge in (queries, *first.queries, *second.queries)):
        return None
    if any(edge % columns for edge in (keys, *first.keys, *second.keys)):
        return None
    ours, theirs = (
        [
            (query // rows, key // columns)
            for query in range(*block.queries, rows)
            for key in range(*block.keys, columns)
        ]
        for block in blocks
    )
    if len(ours) != len(theirs):
        return None
    # A tile of both is at one place in both: there is nothing to choose.
    others = iter([tile for tile in theirs if tile not in ours])
    theirs = [tile if tile in theirs else next(others) for tile in ours]
    return Tiling(
        *(
            Cut(
                size, tuple(tile[axis] for tile in ours), tuple(t[axis] for t in theirs)
            )
            for axis, size in enumerate((rows, columns))
        )
    )


@dataclasses.dataclass(frozen=True)
class Choice:
    """Tiles of one block or of another, which is known when the program runs.

    Attributes:
      tiling: of the two blocks.
      is_second: traced bool, whether it is the second.
    """

    tiling: Tiling
    is_second: jax.Array

    def queries(self, x):
        """Return (B, rows, ...) of (B, T, ...), for each tile."""
        return self._cut(x, self.tiling.queries)

    def keys(self, x):
        """Return (B, columns, ...) of (B, S, ...), for each tile."""
        return self._cut(x, self.tiling.keys)

    def merge(self, attended, length: int):
        """Merge what the tiles' queries saw into what all of them saw.

        Args:
          attended: of each tile (out, lse), (B, rows, N, D) and (B, rows, N) float32.
          length: T, how many queries there are.

        Returns:
          (B, T, N, D) and (B, T, N); queries of no tile give 0 and -inf.
        """
        cut = self.tiling.queries
        nothing = 0, -jnp.inf

        def part(place):
            found = []
            for tile, *places in zip(attended, cut.first, cut.second, strict=True):
                if place not in places:
                    continue
                if places[0] != places[1]:
                    is_here = self.is_second == (places[1] == place)
                    choose = functools.partial(jnp.where, is_here)
                    tile = tuple(map(choose, tile, nothing))
                found.append(tile)
            if not found:
                return tuple(map(jnp.full_like, attended[0], nothing))
            return functools.reduce(lambda a, b: merge(*a, *b), found)

        parts = [part(place) for place in range(length // cut.size)]
        outs, lses = zip(*parts, strict=True)
        return jnp.concatenate(outs, 1), jnp.concatenate(lses, 1)

    def _cut(self, x, cut: Cut):
        def start(first, second):
            # Where a tile does not move, XLA is told so.
            place = jnp.where(self.is_second, second, first)
            return cut.size * (first if first == second else place)

        return [
            jax.lax.dynamic_slice_in_dim(x, start(*places), cut.size, axis=1)
            for places in zip(cut.first, cut.second, strict=True)
        ]
