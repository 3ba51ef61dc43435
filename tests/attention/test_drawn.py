"""Documents, lengths and options that hypothesis draws."""

import dense
import jax.numpy as jnp
import numpy as np
import pytest
import split
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcomm.attention.kernels import tiling

pytestmark = pytest.mark.slow


@st.composite
def _cases(draw):
    tokens = draw(st.integers(1, 24))
    batch = draw(st.integers(1, 2))
    rows = st.lists(st.integers(-1, 2), min_size=tokens, max_size=tokens)
    ids = draw(st.none() | st.lists(rows, min_size=batch, max_size=batch))
    lengths = st.lists(st.integers(0, tokens), min_size=batch, max_size=batch)
    queries, keys = draw(st.none() | lengths), draw(st.none() | lengths)
    sides = st.integers(0, tokens)
    options = dense.Options(
        is_causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(sides, sides)),
        query_ids=None if ids is None else np.array(ids, np.int32),
        query_lengths=None if queries is None else np.array(queries),
        key_lengths=None if keys is None else np.array(keys),
        cap=draw(st.sampled_from([None, 1.5])),
        sinks=draw(st.sampled_from([None, jnp.array([0.5, -1.0], jnp.float32)])),
    )
    legal = ["ring", "all_gather"] + ["halo"] * (options.window is not None)
    how = {
        "size": draw(st.sampled_from([2, 3, 4])),
        "schedule": draw(st.sampled_from(["contiguous", "striped", "zigzag"])),
        "strategy": draw(st.sampled_from(legal)),
    }
    return (batch, tokens, 2, 4), options, how


@settings(max_examples=12, deadline=None, derandomize=True)
@given(_cases())
def test_whatever_is_drawn_equals_dense_attention(case):
    shape, options, how = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "_ROWS", 4)
        patch.setattr(tiling, "_KEYS", 2)
        patch.setattr(tiling, "_FEWEST_QUERIES", 2)
        *arrays, grads = split.random_inputs(shape)
        found = split.attend(*arrays, options, grads, **how)
    expected = dense.attention(*arrays, options, grads)
    split.assert_close(found, expected, 1e-5)
