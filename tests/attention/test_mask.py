import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.attention.kernels.tiles import Tiles
from jaxcomm.attention.mask import FULL, PARTIAL, SKIP, Mask, Tokens
from jaxcomm.attention.schedules.registry import SCHEDULES, get_schedule


def _work(schedule, size, length, tile):
    """Count the tiles that are computed, as int (hop, rank), and those masked."""
    dealer = get_schedule(schedule)
    tiles = Tiles.fit(dealer.segments(length), tile)
    sees = Mask(None, 0, size * length, size * length)
    computed, masked = np.zeros((2, size, size), int)
    for hop in range(size):
        for rank in range(size):
            source = (rank - hop) % size
            held = [dealer.positions(r, size, length) for r in (rank, source)]
            modes = sees.modes(*(Tokens(tiles.split(jnp.asarray(p), 0)) for p in held))
            computed[hop, rank] = (modes != SKIP).sum()
            masked[hop, rank] = (modes == PARTIAL).sum()
    return computed, masked


RULES = {
    "nothing": (None, None),
    "causal": (None, 0),
    "window": (5, 2),
    "causal window": (3, 0),
    "itself": (0, 0),
}


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("lengths", [(32, 32), (27, 30), (0, 5)])
def test_modes_agree_with_the_mask_of_each_pair(schedule, rule, has_documents, lengths):
    dealer = get_schedule(schedule)
    sees = Mask(*RULES[rule], *lengths)
    tiles = Tiles.fit(dealer.segments(8), 3)
    documents = jnp.repeat(jnp.array([0, 1, 2, -1]), jnp.array([11, 4, 15, 2]))
    modes_met = set()

    def tokens(rank, fill):
        held = jnp.asarray(dealer.positions(rank, 4, 8))
        ids = tiles.split(documents[held], 0, "edge") if has_documents else None
        return Tokens(tiles.split(held, 0, fill), ids)

    for rank in range(4):
        for source in range(4):
            queries, keys = tokens(rank, "edge"), tokens(source, 1 << 30)
            modes = sees.modes(queries, keys)
            across = [
                Tokens(*(None if x is None else x[at] for x in of))
                for of, at in (
                    (queries, np.s_[:, None, :, None]),
                    (keys, np.s_[None, :, None, :]),
                )
            ]
            allowed = sees.allowed(*across)
            whole = allowed.all((2, 3))
            # A tile may be called partial though nothing of it is visible.
            assert (whole | (modes != FULL)).all()
            assert not (allowed.any((2, 3)) & (modes == SKIP)).any()
            if not has_documents:
                assert (whole == (modes == FULL)).all()
            modes_met |= set(np.unique(modes).tolist())
    assert SKIP in modes_met or (rule == "nothing" and not has_documents)


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
