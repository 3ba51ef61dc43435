"""What copy engines move between two NVIDIA GPUs or more, against XLA's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

pytestmark = pytest.mark.gpu

SPLIT = jax.P("i")


def outs(mesh, function, x):
    """Return what the ranks of this process get."""
    whole = jax.shard_map(function, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT)
    shards = jax.jit(whole)(x).addressable_shards
    return np.concatenate([np.asarray(shard.data) for shard in shards])


def counted():
    return sum(one.stats()["copied_calls"] for one in jaxcomm.communicators())


def of_engines(mesh, calls, *, is_hop=True):
    """Copy engines do so much on GPUs of one process, and hops between processes."""
    is_gpu = mesh.devices.flat[0].platform == "gpu"
    return calls if is_gpu and (is_hop or jax.process_count() == 1) else 0


def to_next(mesh):
    return [(i, (i + 1) % mesh.size) for i in range(mesh.size)]


def operand(mesh, rows):
    """Return an array of so many rows a rank. Each process makes those of its ranks:
    of eight all rows take 1.4 GB."""

    def of_rank(index):
        rank = (index[0].start or 0) // rows
        return np.random.default_rng(rank).standard_normal(rows, np.float32)

    sharding = jax.NamedSharding(mesh, SPLIT)
    return jax.make_array_from_callback((mesh.size * rows,), sharding, of_rank)


@pytest.fixture
def many(gpus):
    """Of float32, odd. On GPUs 48 MiB: copy engines do from 32 to 64 MiB of hops
    anywhere, and 128 MiB that one of four sends to the others."""
    return 12_500_001 if gpus else 1_001


@pytest.mark.parametrize("name", ["ppermute", "all_gather", "all_to_all"])
def test_much_is_copied_as_jax_lax_has_it(ring, name, many):
    jaxcomm.init(ring, "i")
    # Of an exchange a rank keeps a part, and sends three times as much as of a hop.
    part = 3 * many // (ring.size - 1) + 1
    x = operand(ring, ring.size * part if name == "all_to_all" else many)
    arguments = {
        # A rank that gets nothing.
        "ppermute": {"perm": [(i, i - 1) for i in range(1, ring.size)]},
        "all_gather": {"tiled": True},
        "all_to_all": {"split_axis": 0, "concat_axis": 0, "tiled": True},
    }[name]

    def of(module):
        return lambda x: getattr(module, name)(x, "i", **arguments)

    np.testing.assert_array_equal(
        outs(ring, of(jaxcomm), x), outs(ring, of(jax.lax), x)
    )
    assert counted() == of_engines(ring, 1, is_hop=name == "ppermute")


def test_a_policy_leaves_them_to_nccl(ring, many):
    jaxcomm.init(ring, "i", policy=jaxcomm.CommPolicy(copy_engines=False))
    x = operand(ring, many)
    np.testing.assert_array_equal(
        outs(ring, lambda x: jaxcomm.ring_shift(x, "i"), x),
        outs(ring, lambda x: jax.lax.ppermute(x, "i", to_next(ring)), x),
    )
    assert counted() == 0


def test_halves_in_a_loop_beside_computation_and_their_gradient(ring, many):
    jaxcomm.init(ring, "i")
    x = operand(ring, many)

    def turns(x, shift, done):
        def turn(_, carry):
            held, total = carry
            arriving = shift(held)
            total = total + jnp.sin(held)
            return done(arriving), total

        return jax.lax.fori_loop(0, ring.size + 1, turn, (x, jnp.zeros_like(x)))[1]

    def ours(x):
        return turns(x, lambda x: jaxcomm.ring_shift_start(x, "i"), jaxcomm.Handle.done)

    def theirs(x):
        perm = to_next(ring)
        return turns(x, lambda x: jax.lax.ppermute(x, "i", perm), lambda x: x)

    def with_gradient(function):
        return lambda x: jax.vjp(function, x)[1](jnp.cos(x))[0] + function(x)

    np.testing.assert_allclose(
        outs(ring, with_gradient(ours), x),
        outs(ring, with_gradient(theirs), x),
        rtol=1e-6,
        atol=1e-6,
    )
    assert counted() >= of_engines(ring, 2 * (ring.size + 1))


def test_gathers_in_a_loop_beside_computation(ring, gpus):
    """Turns take the slots again, and begin before others have read the last."""
    jaxcomm.init(ring, "i")
    # Odd, and more than a slot of two arrays.
    rows = 1_250_001 if gpus else 1_001
    x = operand(ring, rows)

    def turns(x, start, done):
        def turn(number, held):
            arriving = start((held, held[::-1]))
            beside = jnp.sin(held)
            one, other = done(arriving)
            of_next = (jax.lax.axis_index("i") + 1) % ring.size * rows
            moved = jax.lax.dynamic_slice(one, (of_next,), (rows,))
            return beside + moved + other[:rows] / (number + 1)

        return jax.lax.fori_loop(0, 9, turn, x)

    np.testing.assert_allclose(
        outs(
            ring,
            lambda x: turns(
                x,
                lambda x: jaxcomm.all_gather_start(x, "i", tiled=True),
                jaxcomm.Handle.done,
            ),
            x,
        ),
        outs(
            ring,
            lambda x: turns(
                x, lambda x: jax.lax.all_gather(x, "i", tiled=True), lambda x: x
            ),
            x,
        ),
        rtol=1e-6,
        atol=1e-6,
    )
    sent = 2 * rows * 4 * (ring.size - 1)
    is_copied = ring.size == 2 or jax.process_count() > 1 or sent >= 32 << 20
    assert counted() == (9 * is_copied if gpus else 0)
