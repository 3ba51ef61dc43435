"""A5: fewer tokens a rank than a tile has."""

import pytest


@pytest.mark.parametrize("schedule", ["contiguous", "striped", "zigzag"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 7])
def test_few_tokens_a_rank(ring, dense, inputs, assert_close, schedule, tokens):
    """A5: tiles whose only visible pair is on the diagonal, beside padding."""
    query, key, value, grads = inputs((1, 4 * tokens, 2, 8))
    options = {"is_causal": True, "grads": grads}
    found = ring(query, key, value, size=4, schedule=schedule, **options)
    assert_close(found, dense(query, key, value, **options), 1e-5)
