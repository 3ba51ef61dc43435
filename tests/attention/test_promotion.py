"""Attention where programs forbid JAX to broadcast arrays of fewer dimensions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm.attention import combine

IDS = jnp.arange(16, dtype=jnp.int32)[None] // 5
OPTIONS = {
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": (3, 0), "strategy": "halo"},
    "gathered": {"is_causal": True, "strategy": "all_gather"},
    "documents": {"query_segment_ids": IDS, "key_value_segment_ids": IDS},
    "lengths": {"key_value_seq_lengths": jnp.array([7])},
    "sinks": {"sinks": jnp.ones(4)},
    "slopes": {"alibi_slopes": jnp.ones(4), "is_causal": True},
    "dropout": {"dropout_rate": 0.5, "dropout_key": np.array([1, 2], np.uint32)},
    "bias": {"bias": jnp.ones((16, 16)), "logits_soft_cap": 3.0},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_gives_what_it_gives_elsewhere(make_mesh, name):
    mesh = make_mesh(context=4)
    x = jax.random.normal(jax.random.key(0), (1, 16, 4, 8))

    def attend(x):
        return jaxcomm.dot_product_attention(
            x, x, x, mesh=mesh, axis_name="context", **OPTIONS[name]
        )

    def run():
        out, transpose = jax.vjp(jax.jit(attend), x)
        return out, transpose(out)

    expected = run()
    with jax.numpy_rank_promotion("raise"):
        found = run()
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_layouts_with_positions_and_combine(make_mesh):
    mesh = make_mesh(context=4)
    layout = jaxcomm.Layout("zigzag", 4, 16)
    x = jax.random.normal(jax.random.key(0), (2, 16, 4, 8))
    x, positions = layout.reorder(x)

    def local(x, positions):
        out, lse = jaxcomm.ring_attention(
            x, x, x, axis_name="context", layout=layout, positions=positions,
            is_causal=True, return_residual=True,
        )  # fmt: skip
        return combine(out, lse, "context")

    split = jax.P(None, "context")

    def run():
        mapped = jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=jax.P())
        return jax.jit(mapped)(x, positions)

    expected = run()
    with jax.numpy_rank_promotion("raise"):
        found = run()
    jax.tree.map(np.testing.assert_array_equal, found, expected)
