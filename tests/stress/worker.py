"""One process of a soak: ``make soak``.

It calls collectives at random, in an order that all processes share, with fresh numbers
each time; compares every result with numpy's, and watches memory. The status is 1 if a
result is wrong, a collective fails or memory grows.
"""

import argparse
import ctypes
import gc
import math
import os
import statistics
import sys

import catalogue
import jax
import models
import numpy as np

import jaxcomm

AXES = ("process", "device")
LANES = ("default", "second")
# Products grow past what is exact, and columns may be of any number.
CASES = {
    name: case
    for name, case in catalogue.CASES.items()
    if case.kind in ("move", "sum", "extreme") and not case.cuts_columns
}
# What ranks are given are pieces of one list; the prime keeps those of a call apart.
_NUMBERS, _STRIDE = 1 << 23, 104_729
# Below these bounds sums of integers are exact, in whatever order; int8 wraps.
_EXACT_BELOW = {"float32": 24, "bfloat16": 8, "float16": 11, "int32": 31, "int8": 14}
# Calls on their way at once.
_MOST_AT_ONCE = 4
# Memory is looked at so often over the run; the last quarter is compared with the
# second, before which everything is compiled and the allocator has its arenas.
_SAMPLES = 40
# XLA's pools breathe; 350 bytes an operation in a full run.
_GROWTH_BYTES = 32 << 20


class Program:
    """A jitted collective over some axes of a mesh, all else drawn."""

    def __init__(self, mesh, number, rng):
        """Compiles nothing yet: the first call does."""
        some = [AXES, AXES[:1], AXES[1:]] if mesh.shape["device"] > 1 else [AXES]
        self.mesh, self.axes = mesh, some[rng.integers(len(some))]
        size = math.prod(mesh.shape[axis] for axis in self.axes)
        self.case = list(CASES.values())[number % len(CASES)]
        self.choice = catalogue.drawn(size, rng)
        self.name = list(_EXACT_BELOW)[rng.integers(len(_EXACT_BELOW))]
        self.dtype = np.dtype(jax.numpy.dtype(self.name))
        # From 8 bytes to 4 MiB for each rank, most of them small.
        drawn = int(8 * np.exp2(19 * rng.random() ** 1.5))
        count = drawn // (size * self.dtype.itemsize)
        self.shape, lane = (size, count), LANES[rng.integers(len(LANES))]

        def local(x):
            case, choice = self.case, self.choice
            return case(jaxcomm, x[0], self.axes, choice, lane=lane)[None]

        self.program = models.over(mesh, local, check_vma=False)
        self.text = f"{self.case.name}({self.name}{[*self.shape]}) over axes "
        self.text += f"{self.axes}, lane {lane!r}"

    def call(self, numbers, offset):
        """Calls it on numbers that follow from an offset, other ones on each rank.

        Returns:
          A function that waits and says in what the result is wrong, if in anything.
        """
        ranks, count = self.mesh.size, math.prod(self.shape)
        begins = (offset + np.arange(ranks) * _STRIDE) % (len(numbers) - count)
        rows = np.stack([numbers[begin : begin + count] for begin in begins])
        x = (rows % ((1 << _EXACT_BELOW[self.name]) // ranks)).astype(self.dtype)
        x = x.reshape(ranks, *self.shape)
        sharding = jax.NamedSharding(self.mesh, jax.P(AXES))
        result = self.program(
            jax.make_array_from_callback(x.shape, sharding, x.__getitem__)
        )
        model = self.case.model(self.choice)
        expected = models.apply_by_group(self.mesh, self.axes, model, x)

        def difference():
            for shard in result.addressable_shards:
                try:
                    models.assert_identical(
                        np.asarray(shard.data), expected[shard.index]
                    )
                except AssertionError as error:
                    return f"{self.text}, on {shard.device}: {error}"
            return ""

        return difference


def held():
    # What is freed is not held: it goes back to the system first.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    shared = max(row.shared_bytes for row in jaxcomm.memory_report())
    return pages * os.sysconf("SC_PAGE_SIZE") - shared


def largest(mesh, value):
    most = models.over(mesh, lambda x: jaxcomm.pmax(x, AXES))
    sharding = jax.NamedSharding(mesh, jax.P(AXES))
    mine = jax.make_array_from_callback(
        (mesh.size,), sharding, lambda _: np.full(1, value, np.int32)
    )
    return int(np.asarray(most(mine).addressable_shards[0].data)[0])


def main(operations: int, number: int, seed: int) -> int:
    """Calls collectives until one is wrong or all are done; returns the status."""
    here, processes = jax.process_index(), jax.process_count()
    devices = np.array(jax.devices()).reshape(processes, -1)
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.Mesh(devices, AXES, axis_types=auto)
    rng = np.random.default_rng(seed)
    numbers = rng.integers(1 << 16, size=_NUMBERS, dtype=np.uint32)
    pool = [Program(mesh, each, rng) for each in range(number)]
    members = jaxcomm.init(mesh, lanes=LANES, backend="host")
    what = f"{operations} operations of {number} programs, {processes} processes "
    what += f"of {devices.shape[1]} devices, seed {seed}"
    if here == 0:
        print(f"{what}, through {members[-1].transport}", flush=True)
    samples, done = [], 0
    while done < operations:
        at_once = min(int(rng.integers(1, _MOST_AT_ONCE + 1)), operations - done)
        # Each of them once, to begin with: then all are compiled.
        chosen = pool[done : done + at_once]
        chosen = chosen or [pool[rng.integers(number)] for _ in range(at_once)]
        calls = [each.call(numbers, int(rng.integers(1 << 40))) for each in chosen]
        for difference in calls:
            if wrong := difference():
                where = f"process {here}: operation {done} of seed {seed}"
                print(f"{where}, {wrong}", file=sys.stderr)
                return 1
            done += 1
        if done * _SAMPLES >= len(samples) * operations:
            samples.append(held())
    quarter = max(len(samples) // 4, 1)
    growth = statistics.median(samples[-quarter:])
    growth -= statistics.median(samples[quarter : 2 * quarter] or samples)
    # Of all processes: once all agree, none has anything left to find fault with.
    growth = largest(mesh, growth)
    is_right = growth <= _GROWTH_BYTES
    if here == 0:
        text = "all right" if is_right else "results right"
        print(f"soak: {what}: {text}; memory grew by {growth / 1e6:.1f} MB at most")
    return 0 if is_right else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m stress.worker")
    for name, default in ("operations", 100_000), ("programs", 40), ("seed", 1):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    sys.exit(main(given.operations, given.programs, given.seed))
