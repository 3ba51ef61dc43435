"""Tiles of tokens, and two blocks as the same number of tiles."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.attention.kernels.tile_select import common_tiling
from jaxcomm.attention.kernels.tiles import Tiles
from jaxcomm.attention.schedules.block import Block


def test_padding_is_spread_over_tiles_of_equal_size():
    tiles = Tiles.fit((1000, 999), 512)
    assert (tiles.size, tiles.count) == (500, 4)


def test_the_edge_fill_repeats_the_last_token_of_each_segment():
    split = Tiles.fit((3, 2), 2).split(jnp.arange(5), 0, "edge")
    assert split.tolist() == [[0, 1], [2, 2], [3, 4]]


WHOLE, FRONT, BACK = (0, 4), (0, 2), (2, 4)


@pytest.mark.parametrize(
    ("blocks", "count"),
    [
        # Of zigzag.
        ((Block(WHOLE, FRONT), Block(BACK, WHOLE)), 2),
        ((Block(FRONT, FRONT), Block(BACK, BACK)), 1),
        ((Block(BACK, WHOLE), Block(BACK, WHOLE)), 1),
        ((Block((0, 8), FRONT), Block(FRONT, (0, 8))), 4),
    ],
)
def test_tiles_cover_each_block_once(blocks, count):
    tiles = common_tiling(*blocks, 8, 8)
    for which, block in zip(("first", "second"), blocks, strict=True):
        seen, expected = np.zeros((2, 8, 8), int)
        rows, columns = (getattr(cut, which) for cut in (tiles.queries, tiles.keys))
        assert len(rows) == count
        for row, column in zip(rows, columns, strict=True):
            row, column = row * tiles.queries.size, column * tiles.keys.size
            seen[row : row + tiles.queries.size, column : column + tiles.keys.size] += 1
        expected[slice(*block.queries), slice(*block.keys)] = 1
        np.testing.assert_array_equal(seen, expected)


@pytest.mark.parametrize(
    "blocks",
    [
        (Block(WHOLE, WHOLE, is_causal=True), Block(WHOLE, WHOLE)),
        (Block(WHOLE, FRONT), Block((0, 0), (0, 0))),
        # More of the one than of the other.
        (Block(WHOLE, WHOLE), Block(BACK, WHOLE)),
        # Not on one grid.
        (Block((0, 5), (0, 3)), Block((3, 5), (0, 5))),
        (Block((0, 2), WHOLE), Block((1, 3), WHOLE)),
    ],
)
def test_blocks_that_are_not_as_many_equal_tiles(blocks):
    assert common_tiling(*blocks, 20, 20) is None
