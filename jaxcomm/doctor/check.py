"""``--check``: run every collective, compare it with XLA's, and time it."""

import dataclasses
import functools
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import jaxcomm
from jaxcomm.communicator import text_table as table

AXIS = "i"
_ROOT = 1
_SMALL = 4 << 10
# What shows bandwidth, and still fits the minute: on a GPU, on a CPU.
_LARGE_ON_GPU, _LARGE_ON_CPU = 64 << 20, 4 << 20
_ROUNDS, _CALLS = 3, 5
_DEVICE_COUNT = r"--xla_force_host_platform_device_count=\S*"


@dataclasses.dataclass(frozen=True)
class CheckedCollective:
    """One collective, as the check runs it.

    Attributes:
      call: ``call(x, **options)`` of a device's operand, a vector. All collectives have
        the options.
      bus: bytes that cross a link of each device for a byte of ``size``, as
        nccl-tests counts them; a function of the number of devices. None if no bytes
        are to be counted.
      shares: whether ``size`` is that of the result, of which a device's operand is
        one part.
    """

    call: Callable[..., Any]
    bus: Callable[[int], float] | None
    shares: bool = False


def collectives(size: int) -> dict[str, CheckedCollective]:
    """Return all collectives for ``size`` devices, by name."""
    ring = [(rank, (rank + 1) % size) for rank in range(size)]

    def of(name, *args, **options):
        # Looked up when it is called: tests replace one by a wrong one.
        return lambda x, **more: getattr(jaxcomm, name)(
            x, AXIS, *args, **options, **more
        )

    def ragged(x, **options):
        # Each rank sends its parts to the ranks in reverse order.
        part, rank = x.shape[0] // size, jax.lax.axis_index(AXIS)
        ranks = jnp.arange(size, dtype=jnp.int32)
        parts = jnp.full(size, part, jnp.int32)
        return jaxcomm.ragged_all_to_all(
            x, jnp.zeros_like(x), part * ranks[::-1], parts,
            jnp.full(size, part, jnp.int32) * rank, parts, axis_name=AXIS, **options,
        )  # fmt: skip

    def both(n):
        return 2 * (n - 1) / n

    def once(n):
        return (n - 1) / n

    def whole(n):
        return 1.0

    root, tiled = {"root": _ROOT}, {"tiled": True}
    return {
        **{name: CheckedCollective(of(name), both) for name in ("psum", "pmean")},
        **{name: CheckedCollective(of(name), both) for name in ("pmax", "pmin")},
        "pprod": CheckedCollective(
            lambda x, **options: jaxcomm.pprod(
                jnp.where(x > 0, 1, -1).astype(x.dtype), AXIS, **options
            ),
            both,
        ),
        "all_gather": CheckedCollective(of("all_gather", **tiled), once, shares=True),
        "psum_scatter": CheckedCollective(of("psum_scatter", **tiled), once),
        "all_to_all": CheckedCollective(of("all_to_all", 0, 0, **tiled), once),
        "ragged_all_to_all": CheckedCollective(ragged, once),
        "ppermute": CheckedCollective(of("ppermute", ring), whole),
        "ring_shift": CheckedCollective(of("ring_shift"), whole),
        "pbroadcast": CheckedCollective(of("pbroadcast", _ROOT), whole),
        "preduce": CheckedCollective(of("preduce", **root), whole),
        "pgather": CheckedCollective(of("pgather", **root, **tiled), once, shares=True),
        "pscatter": CheckedCollective(of("pscatter", **root, **tiled), once),
        "pscan": CheckedCollective(of("pscan"), None),
        "pbarrier": CheckedCollective(of("pbarrier"), None),
    }


class CheckError(Exception):
    """There is nothing to check; the text says what to do."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What one collective did.

    Attributes:
      collective: its name.
      bytes: of the larger of operand and result on one device.
      problem: why it is not right. If None, it is.
      seconds: of one call; None if it failed.
      algorithm_rate, bus_rate: bytes per second, as in nccl-tests; None where
        nccl-tests does not define them.
    """

    collective: str
    bytes: int
    problem: str | None
    seconds: float | None = None
    algorithm_rate: float | None = None
    bus_rate: float | None = None


def use_virtual_devices(count: int) -> None:
    """Have JAX find ``count`` CPU devices and no others. Call it before any device."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = re.sub(_DEVICE_COUNT, "", flags)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def mesh_of_all() -> jax.sharding.Mesh:
    """Return a mesh of all devices in a row."""
    found = jax.devices()
    if len(found) == 1:
        raise CheckError(
            f"JAX finds one device ({found[0].platform}), and collectives need two. "
            f"Pass --devices 8 for virtual CPU devices"
        )
    return jax.make_mesh((len(found),), (AXIS,), axis_types=(AxisType.Auto,))


def backend_of(mesh: jax.sharding.Mesh) -> str:
    """Make the communicator that the collectives use; return its backend."""
    (made,) = jaxcomm.init(mesh, AXIS)
    return made.backend


def run(
    mesh: jax.sharding.Mesh, sizes: Sequence[int] | None = None
) -> Iterator[Result]:
    """Run every collective at every size.

    Args:
      mesh: of one axis, ``AXIS``.
      sizes: bytes. If None, a small one and one that shows bandwidth.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    large = _LARGE_ON_CPU if on_cpu else _LARGE_ON_GPU
    for name, collective in collectives(mesh.size).items():
        for size in sizes or (_SMALL, large):
            yield _run(mesh, name, collective, size)


def _run(mesh, name, collective: CheckedCollective, size) -> Result:
    count = mesh.size
    # Whole parts for every device, in float32.
    part = max(1, size // (4 * count))
    elements = part if collective.shares else part * count
    size = 4 * part * count
    x = _operand(mesh, elements)
    try:
        ours = _program(mesh, collective.call)
        theirs = _program(mesh, functools.partial(collective.call, backend="xla"))
        problem = _difference(ours(x), theirs(x))
        seconds = _seconds_of_a_call(ours, x)
    except Exception as error:
        return Result(name, size, f"{type(error).__name__}: {error}".splitlines()[0])
    if collective.bus is None:
        return Result(name, size, problem, seconds)
    rate = size / seconds
    return Result(name, size, problem, seconds, rate, rate * collective.bus(count))


def _operand(mesh, elements):
    # Small whole numbers: their sums are exact, in every order.
    generator = np.random.default_rng(0)
    whole = generator.integers(-8, 8, mesh.size * elements).astype(np.float32)
    sharding = jax.NamedSharding(mesh, jax.P(AXIS))
    return jax.make_array_from_callback(whole.shape, sharding, lambda at: whole[at])


def _program(mesh, of) -> Callable:
    # Unchecked, so that a result which is the same everywhere still comes from each
    # device and is compared there.
    return jax.jit(
        jax.shard_map(
            lambda x: of(x)[None],
            mesh=mesh,
            in_specs=jax.P(AXIS),
            out_specs=jax.P(AXIS),
            check_vma=False,
        )
    )


def _difference(found, expected):
    """Return how the shards of this process differ, or None."""
    wrong = [
        shard.device
        for shard, right in zip(
            found.addressable_shards, expected.addressable_shards, strict=True
        )
        if not _equal(np.asarray(shard.data), np.asarray(right.data))
    ]
    if not wrong:
        return None
    of_all = len(found.addressable_shards)
    return f"other numbers than XLA's on {len(wrong)} of {of_all} devices: {wrong[0]}"


def _equal(found, right):
    # A mean may round.
    return found.shape == right.shape and np.allclose(found, right, rtol=1e-6, atol=0)


def _seconds_of_a_call(program, x):
    rounds = []
    result = x
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        for _ in range(_CALLS):
            result = program(x)
        jax.block_until_ready(result)
        rounds.append((time.perf_counter() - begun) / _CALLS)
    return statistics.median(rounds)


def text(results: Sequence[Result]) -> str:
    """Draw a table of the results."""
    head = ("collective", "bytes", "result", "time", "GB/s", "bus GB/s")
    return table.text(head, map(_cells, results))


def _cells(result: Result):
    def rate(value):
        return "" if value is None else f"{value / 1e9:.3g}"

    return (
        result.collective,
        table.size(result.bytes),
        "right" if result.problem is None else "WRONG",
        "" if result.seconds is None else table.duration(result.seconds),
        rate(result.algorithm_rate),
        rate(result.bus_rate),
    )
