import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.attention.kernels.tiles import Tiles
from jaxcomm.attention.mask import FULL, MASKED, SKIP, Visibility
from jaxcomm.attention.schedules.registry import SCHEDULES, get_schedule


def _work(schedule, size, length, tile):
    """Count the tiles that are computed, as int (hop, rank), and those masked."""
    dealer = get_schedule(schedule)
    tiles = Tiles.fit(dealer.segments(length), tile)
    sees = Visibility(True, size * length, size * length)
    computed, masked = np.zeros((2, size, size), int)
    for hop in range(size):
        for rank in range(size):
            source = (rank - hop) % size
            held = [dealer.positions(r, size, length) for r in (rank, source)]
            kinds = sees.kinds(*(tiles.split(jnp.asarray(p), 0) for p in held))
            computed[hop, rank] = (kinds != SKIP).sum()
            masked[hop, rank] = (kinds == MASKED).sum()
    return computed, masked


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(32, 32), (27, 30), (0, 5)])
def test_kinds_agree_with_the_mask_of_each_pair(schedule, is_causal, lengths):
    dealer = get_schedule(schedule)
    sees = Visibility(is_causal, *lengths)
    tiles = Tiles.fit(dealer.segments(8), 3)
    for rank in range(4):
        for source in range(4):
            queries = tiles.split(jnp.asarray(dealer.positions(rank, 4, 8)), 0, "edge")
            keys = tiles.split(jnp.asarray(dealer.positions(source, 4, 8)), 0, 1 << 30)
            kinds = sees.kinds(queries, keys)
            allowed = sees.allowed(queries[:, None, :, None], keys[None, :, None, :])
            assert (allowed.all((2, 3)) == (kinds == FULL)).all()
            # A masked tile may be empty, a skipped one must be.
            assert not (allowed.any((2, 3)) & (kinds == SKIP)).any()


def test_under_zigzag_every_rank_computes_the_same_in_every_hop():
    computed, masked = _work("zigzag", 4, 64, 8)
    # Hop 0: two causal squares of 4 x 4 tiles and the full square between them.
    assert computed.tolist() == [[36] * 4] + [[32] * 4] * 3
    # Only the diagonals of hop 0 need a mask.
    assert masked.tolist() == [[8] * 4] + [[0] * 4] * 3


def test_under_contiguous_the_first_rank_idles_and_the_last_never_does():
    computed, _ = _work("contiguous", 4, 64, 8)
    assert computed[:, 0].tolist() == [36, 0, 0, 0]
    assert computed[:, 3].tolist() == [36, 64, 64, 64]


def test_under_striped_every_hop_is_a_causal_square():
    computed, masked = _work("striped", 4, 64, 8)
    assert (computed == 36).all()
    assert (masked == 8).all()
