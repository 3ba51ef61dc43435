"""The float64 oracle, and a ring that takes and returns whole sequences."""

import dense as oracle
import pytest
import split


def dense_attention(query, key, value, *, is_causal=False, grads=None, **options):
    """Attend in float64; see ``tests/support/dense.py``."""
    options = oracle.Options(is_causal=is_causal, **options)
    return oracle.attention(query, key, value, options, grads)


def attend_in_ring(
    query,
    key,
    value,
    *,
    size,
    is_causal=False,
    window=None,
    grads=None,
    schedule="zigzag",
    **others,
):
    """Attend over ``size`` devices; see ``tests/support/split.py``."""
    options = oracle.Options(is_causal=is_causal, window=window)
    return split.attend(
        query, key, value, options, grads, size=size, schedule=schedule, **others
    )


@pytest.fixture(scope="session")
def dense():
    return dense_attention


@pytest.fixture(scope="session")
def ring():
    return attend_in_ring


@pytest.fixture(scope="session")
def inputs():
    return split.random_inputs


@pytest.fixture(scope="session")
def assert_close():
    return split.assert_close


@pytest.fixture(scope="session")
def mesh_of():
    return split.ring_over
