"""Attention where programs forbid JAX to broadcast arrays of fewer dimensions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split

import jaxcomm
from jaxcomm.attention import combine

IDS = jnp.arange(16, dtype=jnp.int32)[None] // 5
OPTIONS = {
    "window": {"is_causal": True, "local_window_size": (3, 0), "strategy": "halo"},
    "gathered": {"is_causal": True, "strategy": "all_gather"},
    "documents": {"query_segment_ids": IDS, "key_value_segment_ids": IDS},
    "lengths": {"key_value_seq_lengths": jnp.array([7])},
    "sinks and slopes": {"sinks": jnp.ones(4), "alibi_slopes": jnp.ones(4)},
    "dropout": {"dropout_rate": 0.5, "dropout_key": np.array([1, 2], np.uint32)},
    "bias": {"bias": jnp.ones((16, 16)), "logits_soft_cap": 3.0},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_and_its_gradients_can_be_had(mesh_of, name):
    def loss(x):
        out = jaxcomm.dot_product_attention(
            x, x, x, mesh=mesh_of(4), axis_name="context", **OPTIONS[name]
        )
        return out.sum()

    with jax.numpy_rank_promotion("raise"):
        jax.jit(jax.grad(loss)).lower(jnp.ones((1, 16, 4, 8)))


def test_layouts_with_positions_and_combine(mesh_of):
    layout = jaxcomm.Layout("zigzag", 4, 16)

    def local(x, positions):
        out, lse = jaxcomm.ring_attention(
            x, x, x, axis_name="context", layout=layout, positions=positions,
            is_causal=True, return_residual=True,
        )  # fmt: skip
        return combine(out, lse, "context")

    specs = {"in_specs": split.SPLIT, "out_specs": jax.P()}
    whole = jax.shard_map(local, mesh=mesh_of(4), **specs)
    with jax.numpy_rank_promotion("raise"):
        jax.jit(whole).lower(*layout.reorder(jnp.ones((2, 16, 4, 8))))
