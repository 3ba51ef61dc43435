"""Many lengths of a sequence over one communicator; one length without more memory."""

from collections.abc import Iterator

import jax

import jaxcomm
from bench import units
from bench.gpu import device_memory
from bench.gpu.attention import forward_and_backward
from bench.gpu.rows import Finding
from bench.gpu.timer import Timer


def rows(timer: Timer) -> Iterator[Finding]:
    """Yields what ring attention of those lengths made and took after the first."""
    _, heads, size = timer.sizes.heads
    split = jax.P(None, "i")

    def attend(q, k, v):
        size = jax.lax.axis_size("i")
        layout = jaxcomm.Layout("zigzag", size, size * q.shape[1])
        tokens = jaxcomm.Tokens(layout, layout.positions_of(jax.lax.axis_index("i")))
        return jaxcomm.ring_attention(q, k, v, "i", tokens, is_causal=True)

    program = timer.program(attend, split)
    gradient = forward_and_backward(program)

    def run(turn):
        tokens = (turn + 1) * timer.sizes.step * timer.size
        x = timer.random((1, tokens, heads, size), "bfloat16", split)
        jax.block_until_ready(program(x, x, x))
        return tokens

    shortest = run(0)
    counters, held = jaxcomm.counters(), device_memory.communicators_bytes()
    first = device_memory.left_bytes()
    longest = shortest
    for turn in range(1, timer.sizes.lengths):
        longest = run(turn)
    # Every length has its program by now, which XLA has put on the devices.
    second = device_memory.left_bytes()
    for turn in range(timer.sizes.lengths):
        run(turn)
    taken = second - device_memory.left_bytes()
    after = jaxcomm.counters()
    made = after.created + after.split - counters.created - counters.split
    grown = device_memory.communicators_bytes() - held
    yield timer.finding(
        f"ring attention of {timer.sizes.lengths} lengths, {shortest} to {longest}",
        f"{made} communicators made after the first length ({after.live} live), which "
        f"hold {units.size(held)}, {grown} B more than then; all but JAX's pool took "
        f"{units.size(max(0, first - second))} meanwhile, programs included, and "
        f"{taken} B when all lengths came again",
        made == 0 and grown == 0 and taken <= 0 and after == counters,
        made=made,
        held_bytes=held,
        grown_bytes=grown,
        taken_bytes=taken,
    )
    tokens = 2 * timer.sizes.step * timer.size
    x = timer.random((1, tokens, heads, size), "bfloat16", split)
    for _ in range(2):
        jax.block_until_ready(gradient(x, x, x))
    peak = device_memory.peak_of_jax()
    for _ in range(timer.sizes.steps):
        jax.block_until_ready(gradient(x, x, x))
    more = device_memory.peak_of_jax() - peak
    yield timer.finding(
        f"{timer.sizes.steps} times the gradient of ring attention of {tokens}",
        f"JAX has {units.size(peak)} in use at most, on all devices: {more} B more "
        "than after two",
        more == 0,
        more_bytes=more,
    )
