"""Dropout leaves out the same weights however a sequence is split."""

import dataclasses

import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split

from jaxcomm.attention.kernels.scores import random_bits

RATE = 0.3
SHAPE = (2, 29, 4, 8)


def _kept(key):
    """What dropout multiplies each weight with, (B, N, T, S)."""
    batch, tokens, heads, _ = SHAPE
    seeds = jax.random.bits(key, (batch, heads), jnp.uint32)
    at = jnp.arange(tokens)
    bits = random_bits(seeds[:, :, None, None], at[:, None], at)
    return np.where(np.asarray(bits) >= int(RATE * 2**32), 1 / (1 - RATE), 0)


@pytest.mark.parametrize(
    ("strategy", "size", "schedule"),
    [("ring", 1, "zigzag"), ("ring", 3, "striped"), ("ulysses", 2, "zigzag"),
     ("all_gather", 4, "contiguous")],
)  # fmt: skip
def test_dropout_is_a_function_of_positions_with_its_gradients(
    strategy, size, schedule
):
    key = jax.random.key(3)
    *arrays, grads = split.random_inputs(SHAPE, (2, 29, 2, 8))
    options = dense.Options(is_causal=True)
    found = split.attend(
        *arrays,
        options,
        grads,
        size=size,
        schedule=schedule,
        strategy=strategy,
        dropout_rate=RATE,
        dropout_key=key,
    )
    options = dataclasses.replace(options, kept=_kept(key))
    split.assert_close(found, dense.attention(*arrays, options, grads), 1e-5)


def test_the_bits_are_as_good_as_random():
    """Share, and independence of rows, columns and seeds, within five deviations."""
    at = jnp.arange(512)
    bits = random_bits(jnp.uint32(jnp.arange(3))[:, None, None], at[:, None], at)
    kept = np.asarray(bits) >= int(RATE * 2**32)
    assert abs(kept.mean() - 0.7) < 5 * (0.21 / kept.size) ** 0.5
    for axis in (1, 2):
        shares = kept.mean(axis)
        assert np.abs(shares - 0.7).max() < 5 * (0.21 / 512) ** 0.5
    centred = (kept - 0.7).reshape(3, -1)
    shifted = (np.roll(kept, 1, 1) - 0.7).reshape(3, -1)
    diagonal = (np.roll(kept, (1, 1), (1, 2)) - 0.7).reshape(3, -1)
    for other in (shifted, diagonal, np.roll(centred, 1, 0)):
        correlation = (centred * other).mean() / 0.21
        assert abs(correlation) < 5 / kept.size**0.5
