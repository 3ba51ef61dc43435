"""What a ring costs: sends, bytes on the wire, memory."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from split import SPLIT, Blocking, inputs, on_ranks, ring_over, sharded

import jaxcomm
from jaxcomm.attention.strategies import loop

SHAPE = (1, 256, 4, 64)  # of a rank's queries, keys and values


def whole(size, **options):
    options = {"schedule": "zigzag", "is_causal": True} | options
    return sharded(functools.partial(on_ranks, **options), size)


def gradient_of(ring):
    def loss(*arrays):
        return (ring(*arrays).astype("float32") ** 2).sum()

    return jax.grad(loss, (0, 1, 2))


@pytest.mark.parametrize("size", [1, 4])
def test_keys_and_values_travel_together_and_gradients_in_float32(size):
    """One key head travels for four query heads."""
    query, key, value, _ = inputs((1, 12 * size, 4, 8), (1, 12 * size, 1, 8))
    arrays = [x.astype("bfloat16") for x in (query, key, value)]
    block = 2 * 12 * 8 * 2  # Bytes of a rank's keys and values.

    def sent(function):
        jaxcomm.finalize()
        jax.block_until_ready(jax.jit(function)(*arrays))
        stats = [one.stats() for one in jaxcomm.communicators()]
        return (
            sum(each["calls"].get("permute", 0) for each in stats),
            sum(each["bytes"] for each in stats) / size,
        )

    others = size - 1
    ring = whole(size)
    assert sent(ring) == (others, others * block)
    # Keys and values again, and their gradients, which are as many float32. What
    # travels at one time travels in one call: only the ends of the way are alone.
    backward = (others and size, others * 3 * block)
    calls, bytes_sent = sent(gradient_of(ring))
    assert (calls - others, bytes_sent - others * block) == backward


def test_the_last_block_is_kept_for_the_backward_pass_in_place_of_the_own():
    query, key, value, _ = inputs((1, 48, 4, 8), (1, 48, 2, 8), dtype=jnp.bfloat16)
    ring = jax.jit(whole(4))
    out, transpose = jax.vjp(ring, query, key, value)
    kept = [x for x in jax.tree.leaves(transpose) if x.ndim > 1]
    lse = 4 * math.prod(query.shape[:3])
    assert sum(x.nbytes for x in kept) == lse + sum(
        # Beside the output, what rounding took from it.
        x.nbytes
        for x in (query, key, value, out, out)
    )


@pytest.fixture(scope="module")
def temporary_bytes(as_users_compile):
    """Gives ``temporary_bytes(size, backward, overlaps)`` of a compiled ring."""

    @functools.cache
    def compile(size, backward, overlaps=True):
        ring = whole(size)
        function = gradient_of(ring) if backward else ring
        array = jax.ShapeDtypeStruct(
            (1, SHAPE[1] * size, *SHAPE[2:]),
            jnp.float32,
            sharding=jax.NamedSharding(ring_over(size), SPLIT),
        )
        with pytest.MonkeyPatch.context() as patch:
            if not overlaps:
                patch.setattr(loop, "ring_shift_start", Blocking)
            jax.clear_caches()  # JAX keeps traces.
            lowered = jax.jit(function).lower(array, array, array)
        jax.clear_caches()
        compiled = lowered.compile(compiler_options=as_users_compile)
        return compiled.memory_analysis().temp_size_in_bytes

    return compile


@pytest.mark.parametrize("backward", [False, True])
def test_memory_does_not_grow_with_the_ring(temporary_bytes, backward):
    temporary = [temporary_bytes(size, backward) for size in (2, 8)]
    assert max(temporary) < 1.05 * min(temporary), temporary


@pytest.mark.parametrize(("size", "backward"), [(8, False), (2, True)])
def test_overlap_costs_the_memory_of_what_is_on_its_way(
    temporary_bytes, size, backward
):
    overlapped = temporary_bytes(size, backward)
    blocking = temporary_bytes(size, backward, overlaps=False)
    one_block = 4 * 2 * math.prod(SHAPE)
    # Backward, the gradients of a block travel beside another.
    on_its_way = one_block * (2 if backward else 1)
    slack = 4096  # scalars and their alignment
    assert overlapped <= blocking + on_its_way + slack, (overlapped, blocking)


def test_every_send_has_a_block_to_be_computed_meanwhile():
    query, key, value, _ = inputs((1, 48, 2, 8))
    ring = whole(4)

    def count(function):
        text = str(jax.make_jaxpr(function)(query, key, value))
        return [
            len(re.findall(rf"jaxcomm_permute{half}\[", text))
            for half in ("_start", "_done", "")
        ]

    # One in the loop over hops.
    assert count(ring) == [1, 1, 0]
    # Forward; K/V before the loop, K/V and their gradients in it, gradients after it.
    assert count(gradient_of(ring)) == [4, 4, 0]


@pytest.mark.parametrize(
    ("strategy", "schedule", "window"),
    [
        ("ring", "zigzag", None),
        ("ring", "contiguous", None),
        ("ring", "striped", None),
        ("all_gather", "zigzag", None),
        ("ulysses", "zigzag", None),
        ("halo", "zigzag", (8, 0)),
    ],
)
def test_the_text_of_a_program_does_not_grow_with_the_tokens(
    strategy, schedule, window
):
    options = {"strategy": strategy, "local_window_size": window, "schedule": schedule}
    gradient = jax.jit(gradient_of(whole(4, **options)))

    def text(tokens):
        x = jax.ShapeDtypeStruct((1, tokens, 4, 8), jnp.float32)
        return gradient.lower(x, x, x).as_text()

    # Other numbers have more digits.
    assert len(text(65536)) < 1.03 * len(text(4096))


def test_layers_that_are_scanned_need_memory_linear_in_the_length(as_users_compile):
    """No mask of all pairs of tokens is kept for the way back."""

    def layer(x, scale):
        out = on_ranks(x * scale, x, x, schedule="zigzag", is_causal=True)
        return x + out, None

    def layers(x, scales):
        return jax.lax.scan(layer, x, scales)[0]

    whole = sharded(layers, 4, (SPLIT, jax.P()))

    def temp_bytes(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        scales = jax.ShapeDtypeStruct((2,), jnp.float32)
        grad = jax.jit(jax.grad(lambda *of: whole(*of).sum()))
        compiled = grad.lower(x, scales).compile(as_users_compile)
        return compiled.memory_analysis().temp_size_in_bytes

    assert temp_bytes(8192) < 2.2 * temp_bytes(4096)
