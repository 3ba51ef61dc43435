"""Thousands of mixed operations, every result checked, while memory stays as it is."""

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm
from bench import units
from bench.gpu import device_memory
from bench.gpu.rows import Finding
from bench.gpu.timer import Timer, local

_DTYPES = "int32", "int8", "float32", "bfloat16"
_LANES = "default", "side"
# Of a program; enough that starting it counts for little.
_TURNS = 10
_OPS_A_TURN = 8
# Below this number sums over 32 ranks are exact in bfloat16 and in int8.
_MODULUS = 7
# CUDA's allocations come in pieces of this size.
_PIECE = 2 << 20


def rows(timer: Timer) -> Iterator[Finding]:
    """Yields what became of the mixed operations, then of broadcasts in a row."""
    auto = (jax.sharding.AxisType.Auto,)
    backwards = jax.sharding.Mesh(timer.mesh.devices[::-1], ("i",), axis_types=auto)
    timers = timer, dataclasses.replace(timer, mesh=backwards)
    for each in timers:
        jaxcomm.init(each.mesh, "i", lanes=_LANES)
    kinds = itertools.product(_DTYPES, timer.sizes.payloads)
    # Without end.
    pairs = itertools.cycle(itertools.product(timers, (_LANES, _LANES[::-1])))
    pool = [
        _Mixed(on, lanes, *kind)
        for kind, (on, lanes) in zip(kinds, pairs, strict=False)
    ]
    wrong = sum(not each.is_right(0) for each in pool)
    before = _held()
    turns = -(-timer.sizes.soak // (_TURNS * _OPS_A_TURN))
    for turn in range(1, turns + 1):
        wrong += not pool[turn % len(pool)].is_right(turn)
    total = (len(pool) + turns) * _TURNS * _OPS_A_TURN
    yield timer.finding(
        "soak",
        f"{total} operations of {len(pool)} programs over {before['communicators']} "
        f"communicators, {wrong} programs with wrong results",
        wrong == 0,
        operations=total,
        wrong=wrong,
    )
    after = _held()
    grown = {name: after[name] - before[name] for name in before}
    flat = not grown["communicators"] and not grown["ours"] and grown["taken"] < _PIECE
    yield timer.finding(
        "soak, memory from the warm-up to the end",
        f"{grown['communicators']} communicators and {grown['ours']} B in them more, "
        f"arrays of JAX {grown['jax']} B more, taken on the devices beside JAX's pool "
        f"{units.size(abs(grown['taken']))} {'less' if grown['taken'] < 0 else 'more'}",
        flat,
        **grown,
    )
    yield _in_a_row(timer)


class _Mixed:
    """A program of mixed operations, and the same over XLA's own."""

    def __init__(self, timer, lanes, dtype, payload):
        count = payload // np.dtype(jnp.dtype(dtype)).itemsize
        rows = max(1, count // timer.size) * timer.size
        values = np.random.default_rng(0).integers(_MODULUS, size=rows * timer.size)
        self._x = timer.spread(values.astype(jnp.dtype(dtype)))
        specs = jax.P("i"), jax.P()
        self._ours, self._theirs = (
            timer.program(_turns(timer, backend, *lanes), specs)
            for backend in (None, "xla")
        )

    def is_right(self, number):
        """Calls both with numbers of their own."""
        number = np.int32(number)
        found = jax.block_until_ready(self._ours(self._x, number))
        expected = self._theirs(self._x, number)
        return np.array_equal(local(found), local(expected))


def _turns(timer, backend, lane, side):
    """Returns the program of x and a number: 10 turns of 8 operations."""
    m, size, ring = jaxcomm, timer.size, timer.ring
    at, beside = ({"lane": each, "backend": backend} for each in (lane, side))

    def turn(_, x):
        def small(x):
            return (x % jnp.asarray(_MODULUS, x.dtype)).astype(x.dtype)

        rank = jax.lax.axis_index("i").astype(x.dtype)
        x = small(m.psum(x, "i", **at) + rank)
        x = m.ppermute(x, "i", ring, **at)
        gathered = m.all_gather(x, "i", tiled=True, **at)
        x = small(m.psum_scatter(gathered, "i", tiled=True, **at) + rank)
        x = m.all_to_all(x.reshape(size, -1), "i", 0, 0, **at).reshape(-1)
        x = small(x + m.pbroadcast(x, "i", source=size - 1, **at))
        shifting = m.ring_shift_start(x, "i", **beside)
        doubled = small(shifting.then(x) * 2)
        x = small(doubled + shifting.done(after=doubled))
        adding = m.psum_start(x, "i", **beside)
        more = small(adding.then(x) + rank)
        return small(more + adding.done(after=more))

    def program(x, number):
        x = (x + number.astype(x.dtype)) % jnp.asarray(_MODULUS, x.dtype)
        return jax.lax.fori_loop(0, _TURNS, turn, x)

    return program


def _held():
    return {
        "communicators": sum(m.backend == "nccl" for m in jaxcomm.communicators()),
        "ours": device_memory.communicators_bytes(),
        "jax": device_memory.in_use_by_jax(),
        "taken": -device_memory.left_bytes(),
    }


def _in_a_row(timer):
    """One communicator, one program, many broadcasts (requirement C8)."""
    count = timer.sizes.in_a_row

    def program(x):
        def one(_, x):
            return jaxcomm.pbroadcast(x + 1, "i", timer.size - 1)

        return jax.lax.fori_loop(0, count, one, x)

    x = timer.spread(np.arange(timer.size, dtype=np.int32))
    found = local(timer.program(program)(x))
    expected = timer.size - 1 + count
    return timer.finding(
        f"{count} broadcasts in a row",
        f"{found.ravel().tolist()}, expected {expected}",
        bool((found == expected).all()),
    )
