"""Programs for platforms that need not be here."""

import types

import jax
import jax.numpy as jnp
import pytest
import split

from jaxcomm.attention.layout import Layout, Tokens
from jaxcomm.attention.positions import TRUSTED
from jaxcomm.attention.ring_attention import ring_attention
from jaxcomm.attention.table import width


def lower_ring(
    *platforms,
    shape=(2, 24, 4, 64),
    key_heads=2,
    value_size=None,
    dtype=jnp.bfloat16,
    schedule="zigzag",
    length=None,
    mesh=None,
    axis_names=None,
    ids=False,
    table=False,
    grads=False,
    **options,
):
    """Lower causal attention of four ranks, or its gradients; for CUDA by default.

    Args:
      platforms: of the program.
      shape: of the queries.
      key_heads: of keys and values.
      value_size: of values, if it is another.
      dtype, schedule, length, mesh, axis_names: of the call.
      ids, table: whether there are segment ids, and what reorder knows of them.
      grads: whether gradients are computed.
      options: of ring_attention, whose collectives are XLA's: those lower anywhere.
    """
    mesh = mesh or split.ring_over(4)
    layout = Layout(schedule, 4, length or shape[1])
    options = {"is_causal": True, "backend": "xla", "strategy": "ring"} | options

    def local(query, key, value, segments, numbers):
        of = segments if ids else None
        tokens = Tokens(layout, TRUSTED, of, numbers if table else None)
        return ring_attention(query, key, value, "context", tokens, **options)

    names = axis_names or set(mesh.axis_names)
    run = split.sharded(local, mesh=mesh, axis_names=names)

    def loss(*arrays):
        results = jax.tree.leaves(run(*arrays))
        return sum(x.astype(jnp.float32).sum() for x in results)

    query = jax.ShapeDtypeStruct(shape, dtype)
    key, value = (
        jax.ShapeDtypeStruct((*shape[:2], key_heads, size), dtype)
        for size in (shape[3], value_size or shape[3])
    )
    segments = jax.ShapeDtypeStruct(shape[:2], jnp.int32)
    traced = jax.jit(jax.grad(loss, (0, 1, 2)) if grads else run)
    numbers = jax.ShapeDtypeStruct((shape[0], 4 * width(4, shape[1] // 4)), jnp.int32)
    traced = traced.trace(query, key, value, segments, numbers)
    return traced.lower(lowering_platforms=platforms or ("cuda",))


@pytest.fixture
def lowered():
    return lower_ring


@pytest.fixture
def lower():
    return lambda *platforms, **options: lower_ring(*platforms, **options).as_text()


@pytest.fixture
def gpu():
    return lambda capability, kind="NVIDIA H200": types.SimpleNamespace(
        compute_capability=capability, device_kind=kind
    )
