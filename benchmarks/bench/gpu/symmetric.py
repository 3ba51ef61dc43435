"""Arrays of a SymmetricPool against ordinary ones."""

from collections.abc import Iterator

import jax
import numpy as np

import jaxcomm
from bench import units
from bench.gpu.rows import Figure, Finding
from bench.gpu.timer import Timer, local


def rows(timer: Timer) -> Iterator[Figure | Finding]:
    """Yields how the pool is registered, then a figure for each collective and size."""
    (member,) = jaxcomm.init(timer.mesh, "i")
    sizes = timer.sizes.large // 16, timer.sizes.large // 2
    pool = jaxcomm.SymmetricPool(timer.mesh, 4 * sizes[-1])
    yield timer.finding("a pool is registered as a", pool.registrations()[member])
    for size in sizes:
        yield from _of_size(timer, member, pool, size)
    yield _recorded(timer, pool, sizes[0])
    pool.close()


def _of_size(timer, member, pool, size):
    x = timer.random((timer.size, size // 4))
    # XLA:CPU gives no memory away that is not its own.
    gives_away = timer.mesh.devices.flat[0].platform != "cpu"
    calls = {
        "psum": lambda x: jaxcomm.psum(x, "i"),
        "ppermute": lambda x: jaxcomm.ppermute(x, "i", timer.ring),
        "all_to_all": lambda x: jaxcomm.all_to_all(
            x.reshape(timer.size, -1), "i", 0, 0, tiled=True
        ).reshape(x.shape),
    }
    for name, call in calls.items():
        # The result goes where an array is that was donated: memory of the pool, too.
        into = jax.jit(
            jax.shard_map(
                lambda old, x, call=call: call(x), mesh=timer.mesh,
                in_specs=jax.P("i"), out_specs=jax.P("i"), check_vma=False,
            ),
            donate_argnums=0, keep_unused=True,
        )  # fmt: skip
        expected = local(timer.program(call)(x))
        before = member.stats()
        pooled = _Turns(into, pool.device_put(x), pool.device_put(x))
        # NCCL adds in another order there.
        right = np.allclose(local(pooled()), expected, rtol=1e-5, atol=1e-5)
        after = member.stats()
        counted, copied = (
            after[field] - before[field]
            for field in ("symmetric_calls", "copied_calls")
        )
        yield timer.finding(
            f"{name} of {units.size(size)} in a pool",
            f"{'right' if right else 'other values'}; {counted} of 1 calls in "
            f"registered memory, {copied} by copy engines",
            right and (counted == gives_away or copied == 1),
        )
        ordinary = _Turns(into, x + 0, x + 0)
        yield timer.compare(
            f"{name} {units.size(size)}, in a pool", pooled, "ordinary arrays", ordinary
        )
        del pooled, ordinary
        pool.reset()


def _recorded(timer, pool, size):
    """Where XLA records what it calls, nothing is registered meanwhile."""
    policy = jaxcomm.CommPolicy(command_buffers=True)
    jaxcomm.init(timer.mesh, "i", lanes="recorded", policy=policy)
    x = timer.random((timer.size, size // 4))

    def hop(old, x):
        return jaxcomm.ppermute(x, "i", timer.ring, lane="recorded")

    program = jax.jit(
        jax.shard_map(
            hop, mesh=timer.mesh, in_specs=jax.P("i"), out_specs=jax.P("i"),
            check_vma=False,
        ),
        donate_argnums=0, keep_unused=True,
    )  # fmt: skip
    turns = _Turns(program, pool.device_put(x), pool.device_put(x))
    # Home again, some rounds later.
    moved = [turns() for _ in range(3 * timer.size)][-1]
    right = np.array_equal(local(moved), local(x))
    del turns, moved
    pool.reset()
    how = pool.registrations()
    return timer.finding(
        "hops in a pool, recorded",
        f"{'right' if right else 'other values'}; registered with {len(how)} "
        f"communicators as {sorted(set(how.values()))}",
        right,
    )


class _Turns:
    """Calls a program on the result of the call before, into what that was made of."""

    def __init__(self, program, old, x):
        self._program, self._old, self._x = program, old, x

    def __call__(self):
        out = self._program(self._old, self._x)
        self._old, self._x = self._x, out
        return out
