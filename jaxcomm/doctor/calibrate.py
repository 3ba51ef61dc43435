"""``--calibrate``: measure what a plan needs to know of this machine."""

import collections
import os
import statistics
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import jaxcomm
from jaxcomm.attention.layout import Tokens
from jaxcomm.attention.positions import TRUSTED
from jaxcomm.communicator import neighbors
from jaxcomm.doctor import in_turns
from jaxcomm.machine import MACHINES, Machine, Sample

AXIS = "i"
# Operands of a rank, in bytes: closer together from 1 MiB on, where caches end.
_LARGE = (eighths << shift for shift in range(17, 21) for eighths in (8, 11))
SIZES = 256, 16 << 10, 256 << 10, *_LARGE, 16 << 20
# What all ranks' results may take together.
_MOST_BYTES = 256 << 20
# Of a result, less than this: glibc maps larger arrays anew each time
# (M_MMAP_THRESHOLD_MAX), and no line joins their times with those of smaller ones.
_MAPPED_BYTES = 32 << 20
# What is measured in small groups, too.
_COMMON = {
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    *("permute", "broadcast"),
}
# What else a machine does comes and goes: passes lie apart.
_PASSES, _ROUNDS = 5, 5
# Causal attention of so many tokens a device, for FLOP/s.
_TOKENS, _HEADS, _HEAD_SIZE = 512, 4, 64


def machine(kept: Machine | None = None) -> Machine:
    """Measure collectives and attention; every process calls this.

    Args:
      kept: an older calibration of this machine, whose samples stay where nothing is
        measured anew: of one process, say, while several are measured.

    Raises:
      ValueError: if ``kept`` is of another platform.
    """
    platform = jax.devices()[0].platform
    if kept is not None and kept.platform != platform:
        raise ValueError(
            f"the file holds a machine of {kept.platform!r} devices, and these are "
            f"{platform!r} devices; name another file"
        )
    found = tuple(samples())
    latency, rate = _line(found)
    measured = {(each.collective, each.transport, each.ranks) for each in found}
    older = () if kept is None else kept.samples
    older = tuple(
        each
        for each in older
        if (each.collective, each.transport, each.ranks) not in measured
    )
    many = _devices_of_a_host(platform)
    return Machine(
        flops=_flops(),
        bytes_per_second=rate,
        latency=latency,
        source=f"calibration of {jax.devices()[0].device_kind} devices",
        platform=platform,
        domain=many,
        host=many,
        memory=_memory(),
        samples=(*older, *found),
    )


def _memory() -> float:
    """Return the bytes of a device; 0 where JAX does not say."""
    return float((jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0))


def samples() -> Iterator[Sample]:
    """Measure every collective at several sizes, in groups of several sizes."""
    count = jax.device_count()
    for ranks in _group_sizes(count):
        # All groups at once, as those of a mesh's axis: they share the machine.
        mesh = jax.make_mesh(
            (count // ranks, ranks), ("groups", AXIS), axis_types=(AxisType.Auto,) * 2
        )
        todo = {
            name: (function, _fitting(name, count, results))
            for name, (function, results) in _collectives(ranks).items()
            if ranks == count or name in _COMMON
        }
        yield from _samples(mesh, ranks, todo)


def _group_sizes(count: int) -> list[int]:
    """Return 2, 4, 8 and so on, as far as they divide the devices, and all of them."""
    sizes = (1 << exponent for exponent in range(1, count.bit_length()))
    return sorted({count, *(ranks for ranks in sizes if count % ranks == 0)})


def _fitting(name: str, devices: int, results: float) -> tuple[int, ...]:
    """Return the sizes whose results fit into memory; a barrier has one."""
    sizes = SIZES if name != "barrier" else SIZES[:1]
    return tuple(
        n
        for n in sizes
        if devices * results * n <= _MOST_BYTES and results * n < _MAPPED_BYTES
    )


def _samples(mesh, ranks: int, todo) -> Iterator[Sample]:
    """Measure functions at sizes, all of them several times over."""
    timers = {name: in_turns.InTurns(mesh, *of) for name, of in todo.items()}
    found: dict[tuple, list[float]] = collections.defaultdict(list)
    for _ in range(_PASSES):
        for name, timer in timers.items():
            took = timer.measure(_ROUNDS)
            for size, seconds in took.seconds.items():
                found[name, took.transport, size] += seconds
    jaxcomm.finalize()
    for (name, transport, size), seconds in found.items():
        took = statistics.median(seconds)
        yield Sample(name, transport, ranks, mesh.size, size, took)


def _collectives(ranks: int) -> dict[str, tuple[Callable, float]]:
    """Return each collective on a vector, and its result's size by its operand's."""

    def ragged(x):
        part = x.shape[0] // ranks
        mine = jax.lax.axis_index(AXIS).astype(jnp.int32)
        to = part * jnp.arange(ranks, dtype=jnp.int32)
        sizes = jnp.full(ranks, part, jnp.int32)
        at = jnp.full(ranks, part, jnp.int32) * mine
        return jaxcomm.ragged_all_to_all(
            x, jnp.zeros_like(x), to, sizes, at, sizes, axis_name=AXIS
        )

    return {
        "all_reduce": (lambda x: jaxcomm.psum(x, AXIS), 1),
        "all_gather": (lambda x: jaxcomm.all_gather(x, AXIS, tiled=True), ranks),
        "reduce_scatter": (lambda x: jaxcomm.psum_scatter(x, AXIS, tiled=True), 1),
        "all_to_all": (lambda x: jaxcomm.all_to_all(x, AXIS, 0, 0, tiled=True), 1),
        "ragged_all_to_all": (ragged, 1),
        "permute": (lambda x: jaxcomm.ring_shift(x, AXIS), 1),
        "broadcast": (lambda x: jaxcomm.pbroadcast(x, AXIS, 0), 1),
        "reduce": (lambda x: jaxcomm.preduce(x, AXIS), 1),
        "gather": (lambda x: jaxcomm.pgather(x, AXIS, tiled=True), ranks),
        "scatter": (lambda x: jaxcomm.pscatter(x.reshape(ranks, -1), AXIS), 1),
        "scan": (lambda x: jaxcomm.pscan(x, AXIS), 1),
        "barrier": (lambda x: jaxcomm.pbarrier(x, AXIS), 1),
    }


def _line(found: tuple[Sample, ...]) -> tuple[float, float]:
    """Return latency and bytes per second, of a permutation of most ranks."""
    sends = [each for each in found if each.collective == "permute"]
    most = max(each.ranks for each in sends)
    sends = sorted(
        (each for each in sends if each.ranks == most), key=lambda each: each.bytes
    )
    first, last = sends[0], sends[-1]
    return first.seconds, last.bytes / max(last.seconds - first.seconds, 1e-9)


def _flops() -> float:
    """Return the FLOP/s of causal attention, of one device while all of them work."""
    size = jax.device_count()
    mesh = jax.make_mesh((size,), (AXIS,), axis_types=(AxisType.Auto,))
    layout = jaxcomm.Layout("zigzag", size, size * _TOKENS)
    shape = (1, size * _TOKENS, _HEADS, _HEAD_SIZE)
    sharding = jax.NamedSharding(mesh, jax.P(None, AXIS))
    dtype = jnp.float32 if jax.devices()[0].platform == "cpu" else jnp.bfloat16
    ones = np.ones(shape, dtype)
    x = jax.make_array_from_callback(shape, sharding, lambda at: ones[at])
    program = jax.jit(
        jax.shard_map(
            # All tokens are alike.
            lambda x: jaxcomm.ring_attention(
                x, x, x, AXIS, Tokens(layout, TRUSTED), is_causal=True
            ),
            mesh=mesh,
            in_specs=jax.P(None, AXIS),
            out_specs=jax.P(None, AXIS),
        )
    )
    jax.block_until_ready(program(x))
    times = []
    for _ in range(3):
        began = time.perf_counter()
        jax.block_until_ready(program(x))
        times.append(time.perf_counter() - began)
    jaxcomm.finalize()
    compared = jaxcomm.attention.compare_strategies(
        layout, heads=_HEADS, head_size=_HEAD_SIZE, is_causal=True
    )
    return compared.rows["ring"].flops / min(times)


def _devices_of_a_host(platform: str) -> int:
    """Return how many devices a host has, as many as one likes of CPU devices."""
    if platform == "cpu":
        return MACHINES["cpu"].host
    processes = tuple(range(jax.process_count()))
    hosts = 1
    if len(processes) > 1:
        found = neighbors.find(processes, jax.process_index())
        hosts = len(set(found.host_of.values()))
    return jax.device_count() // hosts


def written(path: str) -> Machine | None:
    """Return the calibration that a file holds; None if there is no file.

    Raises:
      OSError: if the file could not be written later.
      ValueError: if it holds something else.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise OSError(f"{path}: cannot be written. Name a file in a folder of yours")
    return Machine.load(path) if os.path.exists(path) else None
