"""What is timed with documents and windows is what it is called."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import Options, attention

from bench.gpu import masks

SPLIT = jax.P(None, "i")


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("all_gather", {"window": 5}),
        ("all_gather", {"documents": True}),
        pytest.param("ring", {"documents": True}, marks=pytest.mark.thorough),
        pytest.param("ring", {"window": 5}, marks=pytest.mark.thorough),
    ],
)
def test_it_equals_dense_attention(timer, strategy, options):
    random = np.random.default_rng(0)
    tokens = 32
    x = jnp.asarray(random.normal(size=(1, tokens, 2, 8)), jnp.float32)
    function = functools.partial(masks.attend, strategy=strategy, **options)
    found = timer.program(function, SPLIT)(x, x, x)
    ids = np.arange(tokens)[None] * 16 // tokens if "documents" in options else None
    window = None if ids is not None else (4, 0)
    expected = attention(
        *(x, x, x), Options(is_causal=True, window=window, query_ids=ids, key_ids=ids)
    )
    np.testing.assert_allclose(found, expected[0], atol=1e-5)
