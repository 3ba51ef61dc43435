"""The float64 oracle, and a ring that takes and returns whole sequences."""

import dense as oracle
import jax
import pytest
import split


def dense_attention(query, key, value, *, is_causal=False, grads=None, **options):
    """Attend in float64; see ``tests/support/dense.py``."""
    options = oracle.Options(is_causal=is_causal, **options)
    return oracle.attention(query, key, value, options, grads)


def attend_in_ring(
    query, key, value, *, size, is_causal=False, window=None, grads=None, **others
):
    """Attend over ``size`` devices; see ``tests/support/split.py``."""
    options = oracle.Options(is_causal=is_causal, window=window)
    return split.attend(query, key, value, options, grads, size=size, **others)


def shard(
    local, size=4, in_specs=split.SPLIT, out_specs=split.SPLIT, mesh=None, **options
):
    """Map over ``size`` devices along "context", which split the tokens."""
    mesh = mesh or split.ring_over(size)
    return jax.shard_map(
        local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options
    )


def _fixture(value):
    return pytest.fixture(scope="session")(lambda: value)


dense = _fixture(dense_attention)
ring = _fixture(attend_in_ring)
inputs = _fixture(split.random_inputs)
assert_close = _fixture(split.assert_close)
mesh_of = _fixture(split.ring_over)
sharded = _fixture(shard)
