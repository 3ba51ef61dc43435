"""Right and steady over NCCL on all GPUs: of this process, or of several.

``JAXCOMM_TEST_SOAK`` is the number of operations of the soak. What is right is what
XLA's own collectives give.
"""

import collections
import dataclasses
import functools
import itertools
import os

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stand_in import StandIn

import jaxcomm
from bench.gpu import device_memory, sizes
from bench.gpu.attention import forward_and_backward
from bench.gpu.timer import Timer, local
from jaxcomm.communicator.backends.nccl import devices

pytestmark = pytest.mark.gpu

TINIEST = dataclasses.replace(
    sizes.TINY, dtypes=("int8",), lengths=2, soak=80, rounds=1
)
# A program for each length, which a GPU's compiler takes seconds for.
FULL = dataclasses.replace(sizes.Sizes(), lengths=6)
X64 = "float64", "int64", "uint64", "complex128"
# Every call has these types. What only moves bytes, or starts and ends apart, is the
# same for the others.
WHOLE = "float32", "bfloat16", "int8", "bool", "float8_e5m2"
# XLA adds in another order.
TOLERANCES = {
    "bfloat16": 2e-2, "float16": 2e-3, "float32": 1e-6, "complex64": 1e-6,
    "float64": 1e-14, "complex128": 1e-14,
}  # fmt: skip
# Lanes: whose small sums go by no kernel of ours, and which XLA records in graphs.
POLICIES = {
    "nccl": jaxcomm.CommPolicy(lanes=3, one_shot=False),
    "recorded": jaxcomm.CommPolicy(lanes=3, command_buffers=True),
}
LANES = "default", "side"
TURNS, OPS_A_TURN = 10, 8
# Below this number sums over 32 ranks are exact in bfloat16 and in int8.
MODULUS = 7
# CUDA's allocations come in pieces of this size.
PIECE = 2 << 20
# What a call that is warm must not ask of NCCL and CUDA.
FORBIDDEN = {
    "cuMemAlloc_v2", "cuMemFree_v2", "ncclMemAlloc", "ncclMemFree", "cuEventCreate",
    "cuEventDestroy_v2", "cuStreamCreateWithPriority", "cuStreamDestroy_v2",
    "ncclCommInitRankConfig", "ncclCommSplit", "ncclCommRegister",
    "ncclCommWindowRegister", "ncclCommDestroy", "cuStreamSynchronize",
    "cuCtxSynchronize",
}  # fmt: skip


@pytest.fixture
def timer(ring, gpus):
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.Mesh(ring.devices, ring.axis_names, axis_types=auto)
    return Timer(mesh, FULL if gpus else TINIEST)


def init(timer):
    jaxcomm.init(timer.mesh, "i")
    for lane, policy in POLICIES.items():
        jaxcomm.init(timer.mesh, "i", lanes=lane, policy=policy)


def calls(size, backend):
    cases, starts = catalogue.CASES, catalogue.FUNCTIONS
    backwards = {"axis_index_groups": [list(range(size))[::-1]]}
    every = [(name, case, jaxcomm, {}) for name, case in cases.items()]
    every += [
        (f"{name}, split-phase", case, catalogue.SPLIT_PHASE, {})
        for name, case in starts.items()
        if case.starts
    ]
    by_nccl = {"lane": "nccl"}
    every += [(f"{n}, by NCCL", cases[n], jaxcomm, by_nccl) for n in ("psum", "pmean")]
    every.append(("in groups", cases["all_gather"], jaxcomm, backwards))

    def call(x, case, lib, options):
        choice = catalogue.fixed(size)
        return case(lib, x, "i", choice, backend=backend, **options)

    return {
        name: functools.partial(call, case=case, lib=lib, options=options)
        for name, case, lib, options in every
    }


def on_gpus(size, backend):
    """Return calls that need a GPU's streams, or its graphs."""
    ring = [(rank, (rank + 1) % size) for rank in range(size)]
    at = {"axis_name": "i", "backend": backend}
    recorded = at | {"lane": "recorded"}

    def beside_native(x):
        """Three at a time: two lanes of ours and XLA's own."""
        arriving = jaxcomm.ppermute_start(x, perm=ring, lane="nccl", **at)
        native, is_narrow = arriving.then(x), x.dtype.name.startswith("float8")
        if is_narrow:  # XLA does not send all of them
            native = jax.lax.bitcast_convert_type(native, "uint8")
        native = jax.lax.ppermute(native, "i", ring)
        if is_narrow:
            native = jax.lax.bitcast_convert_type(native, x.dtype)
        own = jaxcomm.ppermute(x, perm=ring[::-1], **at)
        return jnp.stack([native, own, arriving.done()])

    def several(x):
        # Nothing here was among what made the communicator ready.
        x = jaxcomm.all_to_all(x, split_axis=0, concat_axis=0, tiled=True, **recorded)
        x = jaxcomm.ppermute(x, perm=[(b, a) for a, b in ring], **recorded)
        last = jaxcomm.pbroadcast(x, source=size - 1, **recorded)
        return jaxcomm.all_gather(jnp.stack([x, last]), **recorded)

    return {"beside XLA's own": beside_native, "several, recorded": several}


def programs_of(timer, functions, at_once):
    """Return programs by name: one of all takes a GPU's compiler less time.

    And a CPU's more.
    """
    some = {"all": functions} if at_once else {n: {n: functions[n]} for n in functions}
    return {
        name: timer.program(lambda x, s=each: {n: f(x) for n, f in s.items()})
        for name, each in some.items()
    }


def results(timer, functions, x, at_once):
    """Return the results of a second call: XLA may have recorded the first."""
    found = {}
    for program in programs_of(timer, functions, at_once).values():
        jax.block_until_ready(program(x))
        found |= {name: local(result) for name, result in program(x).items()}
    return found


def values(dtype, size):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(size * size, 32 * size, 3))
    if dtype == "bool":
        return x > 0
    if "complex" in dtype:
        return (x + 1j * generator.normal(size=x.shape)).astype(dtype)
    if "int" in dtype:
        return (np.abs(x) * 4).astype(dtype)
    return np.asarray(jnp.asarray(x, dtype))


def narrowed(wide, dtype):
    """Return what XLA computed in float32 as a float8; it reduces few of them.

    Infinity, which ``pscan`` gives where nothing is before a rank, is the extreme of a
    type without it.
    """
    if np.isnan(np.float32(np.inf).astype(dtype)):
        info = jnp.finfo(dtype)
        wide = np.nan_to_num(wide, nan=np.nan, posinf=info.max, neginf=info.min)
    return wide.astype(dtype)


def test_collectives_of_every_type_are_xla_s(timer, gpus):
    init(timer)
    every = [
        calls(timer.size, each) | (on_gpus(timer.size, each) if gpus else {})
        for each in ("nccl", "xla")
    ]
    reductions = [n for n, case in catalogue.CASES.items() if case.kind != "move"]
    reductions += [f"{name}, by NCCL" for name in reductions]
    wrong = []
    for dtype in timer.sizes.dtypes:
        is_whole = dtype in WHOLE
        # NCCL's types are the same between processes.
        if not is_whole and jax.process_count() > 1:
            continue
        ours, theirs = (
            {name: f for name, f in each.items() if is_whole or name in reductions}
            for each in every
        )
        is_narrow = dtype.startswith("float8")
        tolerance = 0.25 if is_narrow else TOLERANCES.get(dtype, 0.0)
        with jax.enable_x64(dtype in X64):
            x = timer.spread(values(dtype, timer.size))
            found = results(timer, ours, x, gpus)
            x = x.astype("float32") if is_narrow else x
            expected = results(timer, theirs, x, gpus)
        for name, one in found.items():
            other = narrowed(expected[name], dtype) if is_narrow else expected[name]
            wide = [np.asarray(y).astype(np.complex128) for y in (one, other)]
            if one.dtype != other.dtype or not np.allclose(
                *wide, rtol=tolerance, atol=tolerance * 8, equal_nan=True
            ):
                wrong.append(f"{name} of {dtype}")
    assert wrong == []


def test_once_warm_nothing_is_allocated(timer, gpus):
    init(timer)
    x = timer.random((timer.size * timer.size, 32 * timer.size, 3))
    programs = programs_of(timer, calls(timer.size, "nccl"), gpus)
    for program in programs.values():
        for _ in range(3):
            jax.block_until_ready(program(x))
    is_stand_in = devices.refusal("cpu") is None
    if is_stand_in:
        StandIn().clear()
    held = device_memory.communicators_bytes()

    def taken_by(name):
        before = device_memory.left_bytes()
        for _ in range(timer.sizes.steady):
            jax.block_until_ready(programs[name](x))
        return before - device_memory.left_bytes()

    # The driver moved 128 KiB once, and gave them back in the next program. What a call
    # takes, it takes each time.
    took = [name for name in programs if taken_by(name)]
    assert {name: each for name in took if (each := taken_by(name))} == {}
    assert device_memory.communicators_bytes() == held
    if is_stand_in:
        used = collections.Counter(call["name"] for call in StandIn().trace())
        assert used["ncclAllReduce"]
        assert not FORBIDDEN & set(used)


def test_lengths_of_a_sequence_make_no_communicator_and_take_no_memory(timer):
    """Nor do many gradients of one length."""
    of, split = timer.sizes, jax.P(None, "i")
    _, heads, width = of.heads

    def attend(q, k, v):
        layout = jaxcomm.Layout("zigzag", timer.size, timer.size * q.shape[1])
        tokens = jaxcomm.Tokens(layout, layout.positions_of(jax.lax.axis_index("i")))
        return jaxcomm.ring_attention(q, k, v, "i", tokens, is_causal=True)

    program = timer.program(attend, split)
    gradient = forward_and_backward(program)

    def run(turn, call=program):
        tokens = (turn + 1) * of.step * timer.size
        x = timer.random((1, tokens, heads, width), "bfloat16", split)
        jax.block_until_ready(call(x, x, x))

    run(0)
    counters, held = (
        jaxcomm.communicators().counters,
        device_memory.communicators_bytes(),
    )
    for turn in range(1, of.lengths):
        run(turn)
    # Every length has its program by now, which XLA has put on the devices.
    left = device_memory.left_bytes()
    for turn in range(of.lengths):
        run(turn)
    assert device_memory.left_bytes() >= left
    assert device_memory.communicators_bytes() == held
    assert jaxcomm.communicators().counters == counters
    for _ in range(2):
        run(1, gradient)
    peak = device_memory.peak_of_jax()
    for _ in range(of.steps):
        run(1, gradient)
    assert device_memory.peak_of_jax() == peak


def mixed(timer, backend, lane, side):
    """Return the program of x and a number: 10 turns of 8 operations."""
    m, size, ring = jaxcomm, timer.size, timer.ring
    at, beside = ({"lane": each, "backend": backend} for each in (lane, side))

    def small(x):
        return (x % jnp.asarray(MODULUS, x.dtype)).astype(x.dtype)

    def turn(_, x):
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
        return jax.lax.fori_loop(0, TURNS, turn, small(x + number.astype(x.dtype)))

    return timer.program(program, (jax.P("i"), jax.P()))


def held_now():
    """Communicators of NCCL's, their bytes, and what is taken beside JAX's pool."""
    count = sum(m.backend == "nccl" for m in jaxcomm.communicators())
    return count, device_memory.communicators_bytes(), -device_memory.left_bytes()


def test_thousands_of_mixed_operations_are_right_and_memory_stays(timer):
    """Of several types and sizes, on two meshes, in two lanes."""
    auto = (jax.sharding.AxisType.Auto,)
    backwards = jax.sharding.Mesh(timer.mesh.devices[::-1], ("i",), axis_types=auto)
    timers = timer, dataclasses.replace(timer, mesh=backwards)
    for each in timers:
        jaxcomm.init(each.mesh, "i", lanes=LANES)
    kinds = itertools.product(("int32", "bfloat16"), timer.sizes.payloads)
    pairs = itertools.cycle(itertools.product(timers, (LANES, LANES[::-1])))
    pool = []
    for (dtype, payload), (on, lanes) in zip(kinds, pairs, strict=False):
        count = payload // jnp.dtype(dtype).itemsize
        rows = max(1, count // on.size) * on.size
        x = np.random.default_rng(0).integers(MODULUS, size=rows * on.size)
        both = [mixed(on, backend, *lanes) for backend in (None, "xla")]
        pool.append((on.spread(x.astype(jnp.dtype(dtype))), *both))

    def run(turn):
        x, ours, theirs = pool[turn % len(pool)]
        found, right = (local(each(x, np.int32(turn))) for each in (ours, theirs))
        np.testing.assert_array_equal(found, right)

    for turn in range(len(pool)):
        run(turn)
    communicators, own, taken = held_now()
    soak = int(os.environ.get("JAXCOMM_TEST_SOAK", timer.sizes.soak))
    for turn in range(-(-soak // (TURNS * OPS_A_TURN))):
        run(turn)
    after = held_now()
    assert after[:2] == (communicators, own)
    assert after[2] < taken + PIECE


def test_broadcasts_in_a_row_lose_nothing(timer):
    count = timer.sizes.in_a_row

    def program(x):
        def one(_, x):
            return jaxcomm.pbroadcast(x + 1, "i", timer.size - 1)

        return jax.lax.fori_loop(0, count, one, x)

    x = timer.spread(np.arange(timer.size, dtype=np.int32))
    assert (local(timer.program(program)(x)) == timer.size - 1 + count).all()
