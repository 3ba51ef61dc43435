"""Documents, lengths and options that hypothesis draws, on every strategy."""

import dense
import numpy as np
import pytest
import split
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcomm.attention.kernels import tile_loops, tiling
from jaxcomm.attention.kernels.tile_loops import TileLoop, over_visible
from jaxcomm.attention.schedules.registry import SCHEDULES
from jaxcomm.attention.strategies.usp import Usp

pytestmark = pytest.mark.thorough

# Ranks, query heads and key heads of which each strategy is capable.
_FOUR_HEADS = [(size, 4, key_heads) for size in (2, 4) for key_heads in (1, 2, 4)]
_ANY = [(size, heads, 2) for size in (2, 3, 4) for heads in (2, 4)]
_SHAPES = {
    "ring": _ANY,
    "all_gather": _ANY,
    "halo": _ANY,
    "ulysses": [*_FOUR_HEADS, (3, 6, 2), (3, 3, 1)],
    "usp": [(4, 4, 2), (4, 2, 1)],
}


@st.composite
def _cases(draw, strategy):
    tokens = draw(st.integers(1, 24))
    batch = draw(st.integers(1, 2))
    size, heads, key_heads = draw(st.sampled_from(_SHAPES[strategy]))
    rows = st.lists(st.integers(-1, 2), min_size=tokens, max_size=tokens)
    ids = draw(st.none() | st.lists(rows, min_size=batch, max_size=batch))
    lengths = st.lists(st.integers(0, tokens), min_size=batch, max_size=batch)
    queries, keys = draw(st.none() | lengths), draw(st.none() | lengths)
    # As wide as the sequence, a window is none, and halo has nothing to send.
    sides = st.integers(0, tokens - (strategy == "halo"))
    window = st.tuples(sides, sides)
    rng = np.random.default_rng(draw(st.integers(0, 9)))

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    bias = draw(
        st.sampled_from([None, (batch, heads, tokens, tokens), (1, 1, 1, tokens)])
    )
    options = dense.Options(
        is_causal=draw(st.booleans()),
        window=draw(window if strategy == "halo" else st.none() | window),
        query_ids=None if ids is None else np.array(ids, np.int32),
        query_lengths=None if queries is None else np.array(queries),
        key_lengths=None if keys is None else np.array(keys),
        cap=draw(st.sampled_from([None, 1.5])),
        sinks=normal(heads) if draw(st.booleans()) else None,
        slopes=normal(heads) if draw(st.booleans()) else None,
        bias=None if bias is None else normal(*bias),
    )
    how = {
        "size": size,
        "schedule": draw(st.sampled_from(sorted(SCHEDULES))),
        "strategy": Usp(2) if strategy == "usp" else strategy,
    }
    shapes = (batch, tokens, heads, 4), (batch, tokens, key_heads, 4)
    value_size = draw(st.sampled_from([4, 6]))
    return shapes, value_size, options, how


@pytest.mark.parametrize("strategy", sorted(_SHAPES))
def test_whatever_is_drawn_equals_dense_attention(assert_close, strategy):
    @settings(max_examples=5, deadline=None, derandomize=True, database=None)
    @given(_cases(strategy))
    def check(case):
        shapes, value_size, options, how = case
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tile_loops, "ON_CPU", TileLoop(2, over_visible))
            patch.setattr(tiling, "_FEWEST_QUERIES", 2)
            *arrays, grads = split.random_inputs(*shapes, value_size=value_size)
            found = split.attend(*arrays, options, grads, **how)
        expected = dense.attention(*arrays, options, grads)
        assert_close(found, expected, 1e-5)

    check()
