"""The tokens before each token, against the whole sequence in natural order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm.attention import document_layout, segment_ids_of
from jaxcomm.attention.state import causal_halo

SPLIT = jax.P(None, "i")


@pytest.mark.parametrize(
    ("schedule", "size", "length", "width", "lengths"),
    [
        ("zigzag", 4, 38, 3, None),
        ("contiguous", 3, 31, 2, (10, 1, 1, 9, 6)),
        # Fragments of one token and two, and a border in each document.
        ("zigzag", 8, 21, 4, (5, 11, 2, 1)),
        # More than two ranks hold; than all.
        ("zigzag", 4, 13, 9, (12,)),
        ("contiguous", 2, 3, 7, None),
        ("striped", 1, 9, 1, (4, 5)),
        ("documents", 4, 40, 3, (25, 1, 9, 5)),
        ("documents", 3, 23, 5, (14, 4, 4, 1)),
    ],
)
def test_equals_a_shift_of_the_whole_sequence(schedule, size, length, width, lengths):
    """And so does its gradient, that of a convolution within documents."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(2, length, 5)).astype(np.float32)
    ids = np.zeros(length, int) if lengths is None else segment_ids_of(lengths, length)
    taps = draw.normal(size=(width, 5)).astype(np.float32)
    grad = draw.normal(size=(2, length, 5)).astype(np.float32)
    run = np.cumsum(np.append(0, ids[1:] != ids[:-1]))
    # expected[t, i] is the token i + 1 before t, if it is of the same run.
    expected = np.zeros((2, length, width, 5))
    of_x = np.zeros((2, length, 5))
    for t in range(length):
        for i in range(min(width, t)):
            if run[t] == run[t - i - 1] and ids[t] >= 0:
                expected[:, t, i] = x[:, t - i - 1]
                of_x[:, t - i - 1] += grad[:, t] * taps[i]
    layout = (
        document_layout(lengths or (), size)
        if schedule == "documents"
        else jaxcomm.Layout(schedule, size, length)
    )
    (x, grad), tokens = layout.reorder(
        (x, grad), segment_ids=None if lengths is None else ids
    )
    mesh = jax.make_mesh(
        (size,), ("i",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:size]
    )

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT)
    def halo(x, tokens):
        return causal_halo(x, "i", tokens, width)

    @jax.jit
    def convolved(x):
        before = halo(x, tokens)
        return (jnp.einsum("btwc,wc->btc", before, taps) * grad).sum(), before

    (_, found), found_grad = jax.value_and_grad(convolved, has_aux=True)(jnp.asarray(x))
    np.testing.assert_array_equal(tokens.restore(found), expected)
    if layout.is_static:
        is_padding = np.asarray(layout.all_positions()).reshape(-1) >= length
        assert not np.asarray(found)[:, is_padding].any()
    np.testing.assert_allclose(tokens.restore(found_grad), of_x, atol=1e-5)
