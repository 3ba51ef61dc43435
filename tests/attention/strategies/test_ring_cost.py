"""What a ring costs: sends, bytes on the wire, memory."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from split import on_ranks

from jaxcomm.attention.strategies import ring as ring_module

SPLIT = jax.P(None, "context")
# What the ring sends with. What is started and never finished is not sent: see
# tests/collectives/test_start_done.py.
SENDS = ("ring_shift", "ring_shift_start")


def _watch_sends(monkeypatch, before):
    """Calls ``before(block, axis_name, **options)`` at every send of a ring."""
    for name in SENDS:
        send = getattr(ring_module, name)

        def watched(block, axis_name, send=send, **options):
            before(block, axis_name, **options)
            return send(block, axis_name, **options)

        monkeypatch.setattr(ring_module, name, watched)


def _whole(size, mesh_of, **options):
    attend = functools.partial(
        on_ranks, **{"schedule": "zigzag", "is_causal": True} | options
    )
    return jax.shard_map(attend, mesh=mesh_of(size), in_specs=SPLIT, out_specs=SPLIT)


@pytest.fixture
def count_sends(monkeypatch):
    """Run a function and return the dtypes of each send of rank 0, in order."""
    sends = []

    def count(block, axis_name, **options):
        dtypes = tuple(leaf.dtype.name for leaf in jax.tree.leaves(block))

        def record(rank):
            if rank == 0:
                sends.append(dtypes)

        jax.debug.callback(record, jax.lax.axis_index(axis_name))

    _watch_sends(monkeypatch, count)

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
def test_backward_sends_gradients_as_often_and_in_float32(
    count_sends, mesh_of, inputs, size
):
    query, key, value, _ = inputs((1, 48, 2, 8), dtype=jnp.bfloat16)
    whole = _whole(size, mesh_of)

    def gradients(*arrays):
        out, transpose = jax.vjp(whole, *arrays)
        return transpose(out)

    sends = count_sends(gradients, query, key, value)
    # Keys and values in the forward and again in the backward pass.
    pairs = [sent[i : i + 2] for sent in sends for i in range(0, len(sent), 2)]
    assert pairs.count(("bfloat16", "bfloat16")) == 2 * (size - 1)
    # One less than there are ranks: those of a rank's own block do not travel.
    assert pairs.count(("float32", "float32")) == size - 1
    assert len(pairs) == 3 * (size - 1)
    # What travels at one time travels in one call.
    assert len(sends) == (2 * size - 1 if size > 1 else 0)


def test_the_last_block_is_kept_for_the_backward_pass_in_place_of_the_own(
    mesh_of, inputs
):
    query, key, value, _ = inputs((1, 48, 4, 8), (1, 48, 2, 8), dtype=jnp.bfloat16)
    whole = jax.jit(_whole(4, mesh_of))
    out, transpose = jax.vjp(whole, query, key, value)
    kept = [x for x in jax.tree.leaves(transpose) if x.ndim > 1]
    lse = 4 * math.prod(query.shape[:3])
    assert sum(x.nbytes for x in kept) == lse + sum(
        x.nbytes for x in (query, key, value, out)
    )


def test_grouped_heads_travel_without_being_replicated(monkeypatch, mesh_of, inputs):
    shapes = set()

    def watch(block, axis_name, **options):
        shapes.update(leaf.shape for leaf in jax.tree.leaves(block))

    _watch_sends(monkeypatch, watch)
    query, key, value, _ = inputs((1, 32, 8, 4), (1, 32, 1, 4))
    jax.eval_shape(jax.grad(lambda *x: _whole(4, mesh_of)(*x).sum()), query, key, value)
    assert shapes == {(1, 8, 1, 4)}


SHAPE = (1, 256, 4, 64)  # of a rank's queries, keys and values


@pytest.fixture(scope="module")
def temporary_bytes(mesh_of, as_users_compile):
    """Gives ``temporary_bytes(size, backward, dtype, overlaps)`` of a compiled ring."""

    @functools.cache
    def compile(size, backward, dtype="float32", overlaps=True):
        whole = _whole(size, mesh_of, strategy=ring_module.Ring(overlaps=overlaps))
        function = whole
        if backward:
            function = jax.grad(lambda *x: (whole(*x) ** 2).sum(), (0, 1, 2))
        array = jax.ShapeDtypeStruct(
            (1, SHAPE[1] * size, *SHAPE[2:]),
            dtype,
            sharding=jax.NamedSharding(mesh_of(size), SPLIT),
        )
        lowered = jax.jit(function).lower(array, array, array)
        compiled = lowered.compile(compiler_options=as_users_compile)
        return compiled.memory_analysis().temp_size_in_bytes

    return compile


@pytest.mark.parametrize("backward", [False, True])
def test_memory_does_not_grow_with_the_ring(temporary_bytes, backward):
    temporary = [temporary_bytes(size, backward) for size in (2, 4, 8)]
    assert max(temporary) < 1.05 * min(temporary), temporary


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_overlap_costs_the_memory_of_what_is_on_its_way(
    temporary_bytes, size, backward, dtype
):
    overlapped = temporary_bytes(size, backward, dtype)
    blocking = temporary_bytes(size, backward, dtype, overlaps=False)
    elements = 2 * math.prod(SHAPE)
    one_block = elements * jnp.dtype(dtype).itemsize
    # Backward, the gradients of a block travel beside another, in float32.
    on_its_way = one_block + (elements * 4 if backward else 0)
    slack = 4096  # scalars and their alignment
    assert overlapped <= blocking + on_its_way + slack, (overlapped, blocking)


@pytest.mark.parametrize("size", [2, 4])
def test_every_send_has_a_block_to_be_computed_meanwhile(mesh_of, inputs, size):
    query, key, value, _ = inputs((1, 48, 2, 8))
    whole = _whole(size, mesh_of)

    def count(function):
        text = str(jax.make_jaxpr(function)(query, key, value))
        return [
            len(re.findall(rf"jaxcomm_permute{half}\[", text))
            for half in ("_start", "_done", "")
        ]

    # One in the loop over hops.
    assert count(whole) == [1, 1, 0]
    # Forward; K/V before the loop, K/V and their gradients in it, gradients after it.
    assert count(jax.grad(lambda *x: whole(*x).sum(), (0, 1, 2))) == [4, 4, 0]


def test_overlap_changes_no_bit(mesh_of, inputs):
    query, key, value, _ = inputs((2, 96, 4, 8), (2, 96, 2, 8), dtype=jnp.bfloat16)

    def run(overlaps):
        strategy = ring_module.Ring(overlaps=overlaps)
        whole = _whole(4, mesh_of, strategy=strategy)
        out, transpose = jax.vjp(jax.jit(whole), query, key, value)
        return out, *transpose(out)

    for ours, blocking in zip(run(True), run(False), strict=True):
        assert bool((ours == blocking).all())


def test_lane_and_backend_reach_every_send(monkeypatch, mesh_of, inputs):
    seen = []

    def watch(block, axis_name, *, shift, lane, backend):
        seen.append((lane, backend))

    _watch_sends(monkeypatch, watch)
    attend = functools.partial(on_ranks, lane="kv", backend="xla")
    whole = jax.shard_map(attend, mesh=mesh_of(4), in_specs=SPLIT, out_specs=SPLIT)
    query, key, value, _ = inputs((1, 16, 2, 8))
    jax.eval_shape(jax.grad(lambda *x: whole(*x).sum()), query, key, value)
    assert set(seen) == {("kv", "xla")}


@pytest.mark.parametrize("remat", [False, True], ids=["kept", "rematerialised"])
def test_layers_that_are_scanned_need_memory_linear_in_the_length(
    mesh_of, as_users_compile, remat
):
    """No mask of all pairs of tokens is kept for the way back."""
    mesh = mesh_of(4)

    def layer(x, scale):
        out = on_ranks(x * scale, x, x, schedule="zigzag", is_causal=True)
        return x + out, None

    def layers(x, scales):
        return jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, scales)[0]

    split = jax.shard_map(layers, mesh=mesh, in_specs=(SPLIT, jax.P()), out_specs=SPLIT)

    def temp_bytes(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        scales = jax.ShapeDtypeStruct((2,), jnp.float32)
        grad = jax.jit(jax.grad(lambda x, scales: split(x, scales).sum()))
        compiled = grad.lower(x, scales).compile(as_users_compile)
        return compiled.memory_analysis().temp_size_in_bytes

    assert temp_bytes(8192) < 2.2 * temp_bytes(4096)
