"""What is lowered of the halves, for the devices at hand, and what XLA may drop."""

import re

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm

RING = [(0, 1), (1, 2), (2, 3), (3, 0)]


def test_xla_drops_no_done_whose_results_it_finds_unused(mesh, as_users_compile):
    """S3: on a GPU the buffers of a start without its done would be used again."""

    def call(x):
        handle = jaxcomm.ppermute_start(x, "i", RING)
        y = jnp.sin(x) @ x.T
        moved = handle.done(after=y)
        # JAX does not see that nothing is left of it; XLA does.
        return y.sum() + jax.lax.select(jnp.zeros(moved.shape, bool), moved, x)

    program = jax.jit(
        jax.shard_map(call, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"))
    )
    text = (
        program.lower(jnp.ones((64, 16)))
        .compile(compiler_options=as_users_compile)
        .as_text()
    )
    assert re.findall(r'custom_call_target="(jaxcomm[^"]*)"', text) == [
        "jaxcomm.permute.start",
        "jaxcomm.done",
    ]


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
