"""What XLA makes of the two halves, and what they keep alive."""

import gc
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

pytestmark = pytest.mark.host_only(
    reason="XLA sees custom calls, whatever carries them out"
)

RING = [(0, 1), (1, 2), (2, 3), (3, 0)]


def _start(x):
    return jaxcomm.ppermute_start(x, "i", RING)


@pytest.fixture
def compiled(mesh, as_users_compile):
    """Returns ``compiled(call, *operands)``."""

    def compile(call, *operands):
        program = jax.jit(
            jax.shard_map(call, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"))
        )
        return program.lower(*operands).compile(compiler_options=as_users_compile)

    return compile


def _targets(text):
    return re.findall(r'custom_call_target="(jaxcomm[^"]*)"', text)


PAIR = ["jaxcomm.permute.start", "jaxcomm.done"]


def _all_of_it(moved, x, y):
    return moved


def _nothing(moved, x, y):
    return y


def _nothing_as_xla_alone_sees(moved, x, y):
    return y.sum() + jax.lax.select(jnp.zeros(moved.shape, bool), moved, x)


@pytest.mark.parametrize(
    ("used", "left"),
    [
        (_nothing, []),
        (_all_of_it, PAIR),
        # On a GPU the buffers of a start without its done would be used again.
        (_nothing_as_xla_alone_sees, PAIR),
    ],
)
def test_a_program_holds_both_halves_or_none(compiled, used, left):
    def call(x):
        handle = jaxcomm.ppermute_start((x, x + 1), "i", RING)
        y = jnp.sin(x) @ x.T @ x
        return used(handle.done(after=y)[1], x, y)

    assert _targets(compiled(call, jnp.ones((64, 16))).as_text()) == left


def test_halves_stay_two_under_vmap(compiled):
    def call(x):
        handle = _start(x)
        return handle.done(after=jnp.sin(x))

    text = compiled(jax.vmap(call), jnp.ones((8, 3))).as_text()
    assert _targets(text) == PAIR


def test_equal_starts_stay_two(compiled):
    def call(x, y):
        first = _start(x)
        y = jnp.sin(y) @ y.T
        moved = first.done(after=y)
        second = _start(x)
        y = jnp.cos(y) @ y.T
        return moved + second.done(after=y) + y.sum()

    program = compiled(call, jnp.arange(8.0), jnp.ones((16, 4)))
    assert sorted(_targets(program.as_text())) == sorted(2 * PAIR)


def test_a_start_of_what_a_loop_does_not_change_stays_in_it(compiled):
    def call(x, y):
        def step(_, y):
            handle = _start(x)
            y = jnp.sin(y) @ y.T
            return y + handle.done(after=y).sum()

        return jax.lax.fori_loop(0, 3, step, y)

    text = compiled(call, jnp.arange(8.0), jnp.ones((16, 4))).as_text()
    (computation,) = (
        part for part in text.split("\n\n") if "jaxcomm.permute.start" in part
    )
    assert "jaxcomm.done" in computation


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_done_takes_operands_and_results_without_a_copy(compiled, in_a_loop):
    def step(x):
        handle = _start(x)
        y = jnp.sin(x) @ x.T
        return handle.done(after=y) + y.sum()

    def call(x):
        x = x @ x.T
        if in_a_loop:
            return jax.lax.fori_loop(0, 3, lambda k, x: step(x), x)
        return step(x)

    text = compiled(call, jnp.ones((64, 16))).as_text()
    (line,) = (line for line in text.splitlines() if '"jaxcomm.done"' in line)
    (start,) = (line for line in text.splitlines() if '"jaxcomm.permute.start"' in line)
    operand = re.search(r"custom-call\((%[\w.-]+)\)", start).group(1)
    result = re.search(r"(%[\w.-]+) = ", start).group(1)
    # Both of them themselves: a buffer in flight is never copied, nor used otherwise.
    assert f"custom-call({operand}, {result}, " in line
    assert "output_to_operand_aliasing={{}: (1, {})}" in line


def test_memory_is_that_of_operand_and_result(compiled):
    count = 1 << 16

    def program(start, done):
        def call(x):
            handle = start(x * 2)
            total = jnp.sin(x).sum()
            return done(handle, total) + total

        return compiled(call, jnp.ones(4 * count)).memory_analysis()

    whole = program(lambda x: jaxcomm.ppermute(x, "i", RING), lambda x, _: x)
    halves = program(_start, lambda h, after: h.done(after=after))
    slack = 1024  # scalars and their alignment
    assert halves.temp_size_in_bytes <= whole.temp_size_in_bytes + 4 * count + slack


def test_nothing_is_held_when_the_program_is_over(mesh):
    def call(x):
        handle = _start(x)
        seen.append(weakref.ref(handle))
        return handle.done(after=jnp.sin(x))

    seen: list = []
    program = jax.jit(
        jax.shard_map(call, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"))
    )
    x = jax.device_put(jnp.arange(4.0), jax.NamedSharding(mesh, jax.P("i")))
    program(x).block_until_ready()
    gc.collect()
    assert seen
    assert seen[0]() is None
    before = len(jax.live_arrays())
    for _ in range(20):
        result = program(x)
    result.block_until_ready()
    held = [weakref.ref(x), weakref.ref(result)]
    del x, result
    gc.collect()
    assert [ref() for ref in held] == [None, None]
    assert len(jax.live_arrays()) <= before
    assert all(c.stats()["in_flight"] == 0 for c in jaxcomm.communicators())


def test_halves_under_two_orders_of_devices(make_mesh):
    """C4: a lowering for one order of devices must not serve the other."""
    straight = make_mesh(i=4)
    crossed = jax.sharding.Mesh(
        straight.devices[[2, 0, 3, 1]], ("i",), axis_types=straight.axis_types
    )

    @jax.jit
    def program(x):
        def local(x):
            handle = jaxcomm.ring_shift_start(x, "i")
            return handle.done(after=x * 2)

        return jax.shard_map(local, in_specs=jax.P("i"), out_specs=jax.P("i"))(x)

    x = np.arange(4.0, dtype=np.float32)
    for mesh in (straight, crossed, straight, crossed):
        placed = jax.device_put(x, jax.NamedSharding(mesh, jax.P("i")))
        with jax.set_mesh(mesh):
            np.testing.assert_array_equal(program(placed), np.roll(x, 1))
    assert [c.stats()["calls"] for c in jaxcomm.communicators()] == [{"permute": 2}] * 2
