"""The bits by which dropout chooses. What it leaves out: ``test_options.py``."""

import jax.numpy as jnp
import numpy as np

from jaxcomm.attention.kernels.scores import random_bits


def test_the_bits_are_as_good_as_random():
    """Share, and independence of rows, columns and seeds, within five deviations."""
    at = jnp.arange(512)
    bits = random_bits(jnp.uint32(jnp.arange(3))[:, None, None], at[:, None], at)
    kept = np.asarray(bits) >= int(0.3 * 2**32)
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
