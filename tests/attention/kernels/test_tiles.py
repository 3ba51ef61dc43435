import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.attention.kernels.tiles import Tiles


@pytest.mark.parametrize("segments", [(8,), (7,), (5, 4), (1, 0), (16, 15), ()])
@pytest.mark.parametrize("largest", [1, 3, 4, 100])
def test_join_undoes_split_and_no_tile_straddles_two_segments(segments, largest):
    tiles = Tiles.fit(segments, largest)
    length = sum(segments)
    owner = jnp.repeat(jnp.arange(len(segments)), jnp.array(segments, jnp.int32))
    x = jnp.stack([jnp.arange(length), owner.astype(jnp.int32)]).reshape(2, length, 1)
    split = tiles.split(x, 1, -1)
    assert split.shape == (2, tiles.count, tiles.size, 1)
    assert tiles.size <= largest
    np.testing.assert_array_equal(tiles.join(split, 1), x)
    for tile in split[1]:
        assert len(set(tile.ravel().tolist()) - {-1}) == 1


def test_padding_is_spread_over_tiles_of_equal_size():
    tiles = Tiles.fit((1000, 999), 512)
    assert (tiles.size, tiles.count) == (500, 4)


def test_the_edge_fill_repeats_the_last_token_of_each_segment():
    split = Tiles.fit((3, 2), 2).split(jnp.arange(5), 0, "edge")
    assert split.tolist() == [[0, 1], [2, 2], [3, 4]]
