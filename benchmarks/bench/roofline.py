"""What the machine can do at most: copy bytes, multiply matrices."""

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from bench import timing
from bench.devices import AXIS, mesh_of, place, small_integers

BYTES, FLOP = "bytes", "FLOP"
_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Roofline:
    """One way to use the machine fully.

    Attributes:
      name: what it does.
      unit: of its work.
      work: how much of it one call does.
      call: does it once.
      rate: work per second, the median of a few calls when the benchmark began.
    """

    name: str
    unit: str
    work: float
    call: Callable[[], object]
    rate: float = 0.0


def measure(copy_bytes: int, product_size: int, devices: int) -> list[Roofline]:
    """Measure all candidates, interleaved.

    Args:
      copy_bytes: of the array to copy; more than the caches hold.
      product_size: rows and columns of the float32 matrices to multiply.
      devices: on how many to split the product in the second of its forms.
    """
    cores = os.cpu_count() or 1
    candidates = [
        *(_copy(copy_bytes, threads) for threads in sorted({1, cores})),
        _product(product_size, 1),
        _product(product_size, devices),
    ]
    calls: Mapping = {roofline.name: roofline.call for roofline in candidates}
    for call in calls.values():
        call()
    once = dict.fromkeys(calls, 1)
    samples = timing.interleave(calls, calls=once, rounds=_ROUNDS)
    return [
        dataclasses.replace(
            roofline,
            rate=roofline.work / timing.Spread.of(samples[roofline.name]).median,
        )
        for roofline in candidates
    ]


def best(rooflines: list[Roofline], unit: str) -> Roofline:
    """Return the fastest of those that do this kind of work."""
    return max(
        (roofline for roofline in rooflines if roofline.unit == unit),
        key=lambda roofline: roofline.rate,
    )


def _copy(size, threads):
    source = np.ones(size, np.uint8)
    target = np.ones_like(source)
    parts = list(
        zip(
            np.array_split(target, threads),
            np.array_split(source, threads),
            strict=True,
        )
    )
    pool = concurrent.futures.ThreadPoolExecutor(threads)

    def call():
        # numpy lets go of the interpreter lock while it copies.
        list(pool.map(lambda part: np.copyto(*part), parts))

    name = f"memcpy, {threads} thread{'s' if threads > 1 else ''}"
    # Each byte is read and written, as the work of a collective is counted.
    return Roofline(name, BYTES, 2 * size, call)


def _product(size, devices):
    rows = size // devices * devices
    mesh = mesh_of(devices)
    left = place(small_integers((rows, size)), mesh, jax.P(AXIS))
    right = place(small_integers((size, size)), mesh, jax.P())
    multiply = jax.jit(
        jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(jax.P(AXIS), jax.P()),
                      out_specs=jax.P(AXIS))
    )  # fmt: skip

    def call():
        multiply(left, right).block_until_ready()

    split = f" split over {devices} devices" if devices > 1 else ""
    name = f"float32 product {rows} x {size} x {size}{split}"
    return Roofline(name, FLOP, 2.0 * rows * size * size, call)
