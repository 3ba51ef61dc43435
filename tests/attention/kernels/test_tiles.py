"""Tiles of tokens, two blocks by halves, and which tiles are computed and masked."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.attention.kernels.blocks import are_halves
from jaxcomm.attention.kernels.xla.tiles import Cut
from jaxcomm.attention.mask import FULL, SKIP, Coordinates, Mask
from jaxcomm.attention.pairs import Block


def test_the_edge_fill_repeats_the_last_token_of_each_segment():
    split = Cut.fit((3, 2), 2).split(jnp.arange(5), 0, "edge")
    assert split.tolist() == [[0, 1], [2, 2], [3, 4]]


WHOLE, FRONT, BACK = (0, 4), (0, 2), (2, 4)


@pytest.mark.parametrize(
    "blocks",
    [
        (Block(WHOLE, WHOLE, right=0), Block(WHOLE, WHOLE)),
        (Block(WHOLE, FRONT), Block((0, 0), (0, 0))),
        # More of the one than of the other.
        (Block(WHOLE, WHOLE), Block(BACK, WHOLE)),
        # Of an odd length.
        (Block((0, 5), (0, 3)), Block((3, 5), (0, 5))),
        (Block(FRONT, WHOLE), Block((1, 3), WHOLE)),
        # The other way round.
        (Block(BACK, WHOLE), Block(WHOLE, FRONT)),
    ],
)
def test_blocks_that_are_no_halves(blocks):
    size = blocks[0].shape[0]
    assert not are_halves(blocks, size, 4 if size == 4 else 5)


@pytest.mark.parametrize(
    ("left", "right", "lengths", "documents"),
    [(None, None, (27, 30), None), (5, 7, (32, 27), None), (11, 0, (32, 32), None),
     (None, 0, (27, 32), [11, 4, 15, 2]), (9, 9, (32, 32), [8, 8, 16])],
)  # fmt: skip
def test_tiles_are_whole_or_skipped_where_all_or_nothing_is_seen(
    left, right, lengths, documents
):
    sees, at = Mask(left, right, *lengths), jnp.arange(32, dtype=jnp.int32)
    ids = None
    if documents:
        ids = jnp.asarray(np.repeat(np.arange(len(documents)) - 1, documents))
    of_tiles = Coordinates(*(None if x is None else x.reshape(8, 4) for x in (at, ids)))
    modes = sees.modes(of_tiles, of_tiles)
    rows, columns = (
        Coordinates(
            *(None if x is None else jnp.expand_dims(x, axis) for x in (at, ids))
        )
        for axis in (1, 0)
    )
    allowed = sees.allowed(rows, columns).reshape(8, 4, 8, 4)
    np.testing.assert_array_equal(modes == FULL, allowed.all((1, 3)))
    # A tile may be called partial though nothing of it is visible.
    assert not (allowed.any((1, 3)) & (modes == SKIP)).any()
