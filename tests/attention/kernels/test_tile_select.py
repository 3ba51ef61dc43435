import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.attention.kernels.tile_select import Choice, common_tiling
from jaxcomm.attention.merge import merge
from jaxcomm.attention.schedules.block import Block
from jaxcomm.attention.schedules.registry import SCHEDULES

WHOLE, FRONT, BACK = (0, 4), (0, 2), (2, 4)
# Pairs of blocks, and how many tiles each makes.
PAIRS = {
    "zigzag": (Block(WHOLE, FRONT), Block(BACK, WHOLE), 2),
    "nothing in common": (Block(FRONT, FRONT), Block(BACK, BACK), 1),
    "everything in common": (Block(BACK, WHOLE), Block(BACK, WHOLE), 1),
    "keys move": (Block(WHOLE, FRONT), Block(WHOLE, BACK), 1),
    "four tiles": (Block((0, 8), FRONT), Block(FRONT, (0, 8)), 4),
}


@pytest.fixture(params=PAIRS)
def pair(request):
    return PAIRS[request.param]


def _normal(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype("float32")


def test_tiles_cover_each_block_once(pair):
    *blocks, count = pair
    tiles = common_tiling(*blocks, 8, 8)
    for which, block in zip(("first", "second"), blocks, strict=True):
        seen = np.zeros((8, 8), int)
        rows, columns = (getattr(cut, which) for cut in (tiles.queries, tiles.keys))
        assert len(rows) == len(columns) == count
        for row, column in zip(rows, columns, strict=True):
            seen[_part(tiles.queries, row), _part(tiles.keys, column)] += 1
        expected = np.zeros((8, 8), int)
        expected[slice(*block.queries), slice(*block.keys)] = 1
        np.testing.assert_array_equal(seen, expected)


def _part(cut, place):
    return slice(cut.size * place, cut.size * (place + 1))


@pytest.mark.parametrize("which", [0, 1])
def test_attention_of_the_tiles_is_that_of_the_block(pair, which):
    *blocks, _ = pair
    choice = Choice(common_tiling(*blocks, 8, 8), jnp.array(bool(which)))
    query, key = _normal(2, 8, 3, 4), _normal(2, 8, 3, 5)[..., :4]
    tiles = zip(choice.queries(query), choice.keys(key), strict=True)
    out, lse = choice.merge([_attend(*tile) for tile in tiles], 8)
    rows, columns = slice(*blocks[which].queries), slice(*blocks[which].keys)
    expected = np.zeros_like(query), np.full((2, 8, 3), -np.inf)
    seen = _attend(query[:, rows], key[:, columns])
    for x, whole, part in zip((out, lse), expected, seen, strict=True):
        whole[:, rows] = part
        np.testing.assert_allclose(x, whole, atol=1e-5)


def _attend(query, key):
    scores = jnp.einsum("btnd,bsnd->btns", query, key)
    weights = jax.nn.softmax(scores, -1)
    return jnp.einsum("btns,bsnd->btnd", weights, key), jax.nn.logsumexp(scores, -1)


@pytest.mark.parametrize("which", [0, 1])
def test_tiles_of_the_same_queries_are_merged(which):
    *blocks, _ = PAIRS["zigzag"]
    choice = Choice(common_tiling(*blocks, 4, 4), jnp.array(bool(which)))
    tiles = [(_normal(1, 2, 1, n), _normal(1, 2, 1) + n) for n in (3, 4)]
    tiles = [(out[..., :3], lse) for out, lse in tiles]
    found = choice.merge(tiles, 4)
    if which:
        nothing = np.zeros((1, 2, 1, 3)), np.full((1, 2, 1), -np.inf)
        front, back = nothing, merge(*tiles[0], *tiles[1])
    else:
        front, back = tiles
    for x, a, b in zip(found, front, back, strict=True):
        np.testing.assert_array_equal(x, np.concatenate([a, b], 1))


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


def test_queries_and_keys_are_whole_parts():
    blocks = PAIRS["zigzag"][:2]
    assert common_tiling(*blocks, 4, 4)
    assert common_tiling(*blocks, 5, 4) is common_tiling(*blocks, 4, 5) is None


def test_the_schedule_that_needs_no_branch_is_zigzag_with_an_even_length():
    found = {
        name
        for name, schedule in SCHEDULES.items()
        for blocks in [schedule.blocks(6)]
        if common_tiling(blocks.earlier, blocks.later, 6, 6)
    }
    assert found == {"zigzag"}
    odd = SCHEDULES["zigzag"].blocks(7)
    assert common_tiling(odd.earlier, odd.later, 7, 7) is None
