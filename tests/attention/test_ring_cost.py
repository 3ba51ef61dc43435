"""What a ring costs: sends, bytes on the wire, memory."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxcomm.attention import ring as ring_module

SPLIT = jax.P(None, "context")
ring_shift = ring_module.ring_shift


def _whole(size, mesh_of):
    attend = functools.partial(
        ring_module.ring_attention, axis_name="context", is_causal=True
    )
    return jax.shard_map(attend, mesh=mesh_of(size), in_specs=SPLIT, out_specs=SPLIT)


@pytest.fixture
def count_sends(monkeypatch):
    """Run a function and return the dtypes of each send of rank 0, in order."""
    sends = []

    def counted(block, axis_name, **options):
        dtypes = tuple(leaf.dtype.name for leaf in jax.tree.leaves(block))

        def record(rank):
            if rank == 0:
                sends.append(dtypes)

        jax.debug.callback(record, jax.lax.axis_index(axis_name))
        return ring_shift(block, axis_name, **options)

    monkeypatch.setattr(ring_module, "ring_shift", counted)

    def run(function, *arrays):
        sends.clear()
        jax.block_until_ready(jax.jit(function)(*arrays))
        jax.effects_barrier()
        return list(sends)

    return run


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_forward_sends_keys_and_values_together_size_minus_one_times(
    count_sends, mesh_of, inputs, size
):
    query, key, value, _ = inputs((1, 48, 2, 8), dtype=jnp.bfloat16)
    sends = count_sends(_whole(size, mesh_of), query, key, value)
    assert sends == [("bfloat16", "bfloat16")] * (size - 1)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_backward_sends_gradients_once_more_and_in_float32(
    count_sends, mesh_of, inputs, size
):
    query, key, value, _ = inputs((1, 48, 2, 8), dtype=jnp.bfloat16)
    whole = _whole(size, mesh_of)

    def gradients(*arrays):
        out, transpose = jax.vjp(whole, *arrays)
        return transpose(out)

    sends = count_sends(gradients, query, key, value)
    # Keys and values in the forward and again in the backward pass.
    assert sends.count(("bfloat16", "bfloat16")) == 2 * (size - 1)
    assert sends.count(("float32", "float32")) == (size if size > 1 else 0)
    assert len(sends) == sends.count(("bfloat16",) * 2) + sends.count(("float32",) * 2)


def test_grouped_heads_travel_without_being_replicated(monkeypatch, mesh_of, inputs):
    shapes = set()

    def watched(block, axis_name, **options):
        shapes.update(leaf.shape for leaf in jax.tree.leaves(block))
        return ring_shift(block, axis_name, **options)

    monkeypatch.setattr(ring_module, "ring_shift", watched)
    query, key, value, _ = inputs((1, 32, 8, 4), (1, 32, 1, 4))
    jax.eval_shape(jax.grad(lambda *x: _whole(4, mesh_of)(*x).sum()), query, key, value)
    assert shapes == {(1, 8, 1, 4)}


@pytest.mark.parametrize("backward", [False, True])
def test_memory_does_not_grow_with_the_ring(mesh_of, backward):
    temporary = []
    for size in (2, 4, 8):
        whole = _whole(size, mesh_of)
        function = whole
        if backward:
            function = jax.grad(lambda *x, f=whole: (f(*x) ** 2).sum(), (0, 1, 2))
        array = jax.ShapeDtypeStruct(
            (1, 256 * size, 4, 64),
            jnp.float32,
            sharding=jax.NamedSharding(mesh_of(size), SPLIT),
        )
        compiled = jax.jit(function).lower(array, array, array).compile()
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)
    assert max(temporary) < 1.05 * min(temporary), temporary


def test_lane_and_backend_reach_every_send(monkeypatch, mesh_of, inputs):
    seen = []

    def watched(block, axis_name, *, lane, backend):
        seen.append((lane, backend))
        return ring_shift(block, axis_name)

    monkeypatch.setattr(ring_module, "ring_shift", watched)
    attend = functools.partial(
        ring_module.ring_attention, axis_name="context", lane="kv", backend="xla"
    )
    whole = jax.shard_map(attend, mesh=mesh_of(4), in_specs=SPLIT, out_specs=SPLIT)
    query, key, value, _ = inputs((1, 16, 2, 8))
    jax.eval_shape(jax.grad(lambda *x: whole(*x).sum()), query, key, value)
    assert set(seen) == {("kv", "xla")}
