"""One process of a soak: ``make soak``.

It calls collectives at random, in an order that all processes share, with fresh numbers
each time; compares every result with numpy's, and watches memory. The status is 1 if a
result is wrong, a collective fails or memory grows.
"""

import argparse
import ctypes
import dataclasses
import gc
import os
import statistics
import sys

import jax
import models
import numpy as np

import jaxcomm
from stress import programs

# Calls on their way at once.
_MOST_AT_ONCE = 4
_PROGRESS_OPERATIONS = 5000
# Memory is looked at so often over the run; the last quarter is compared with the
# second, before which everything is compiled and the allocator has its arenas.
_SAMPLES = 40
# XLA's pools breathe; 350 bytes an operation in a full run.
_GROWTH_BYTES = 32 << 20
_C = ctypes.CDLL(None)


@dataclasses.dataclass
class Memory:
    """What this process held over the run, in bytes.

    Attributes:
      resident: all of it.
      shared: of that, of the memory that the processes share.
    """

    resident: list[int] = dataclasses.field(default_factory=list)
    shared: list[int] = dataclasses.field(default_factory=list)

    def sample(self) -> None:
        """Looks now."""
        # What is freed is not held: it goes back to the system first.
        gc.collect()
        _C.malloc_trim(0)
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[1])
        self.resident.append(pages * os.sysconf("SC_PAGE_SIZE"))
        self.shared.append(max(r.shared_bytes for r in jaxcomm.memory_report()))

    def growth(self) -> int:
        """Returns by how much the rest grew from the second to the last quarter."""
        own = [r - s for r, s in zip(self.resident, self.shared, strict=True)]
        quarter = max(len(own) // 4, 1)
        return int(
            statistics.median(own[-quarter:])
            - statistics.median(own[quarter : 2 * quarter] or own)
        )


def main(operations: int, number: int, seed: int) -> int:
    """Calls collectives until one is wrong or all are done; returns the status."""
    here, processes = jax.process_index(), jax.process_count()
    devices = np.array(jax.devices()).reshape(processes, -1)
    mesh = jax.sharding.Mesh(
        devices, programs.AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    rng = np.random.default_rng(seed)
    numbers = programs.numbers(rng)
    pool = [programs.Program(mesh, each, rng) for each in range(number)]
    members = jaxcomm.init(mesh, lanes=programs.LANES, backend="host")

    def say(text):
        if here == 0:
            print(text, flush=True)

    what = (
        f"{operations} operations of {len(pool)} programs, {processes} processes "
        f"of {devices.shape[1]} devices, seed {seed}"
    )
    say(f"{what}, through {members[-1].transport}")
    memory = Memory()
    done = told = 0
    while done < operations:
        at_once = min(int(rng.integers(1, _MOST_AT_ONCE + 1)), operations - done)
        # Each of them once, to begin with: then all are compiled.
        chosen = pool[done : done + at_once] or [
            pool[rng.integers(len(pool))] for _ in range(at_once)
        ]
        calls = [
            (program, program.call(numbers, int(rng.integers(1 << 40))))
            for program in chosen
        ]
        for program, call in calls:
            if wrong := call.difference():
                print(f"process {here}: operation {done} of seed {seed}, "
                      f"{program.text}, {wrong}", file=sys.stderr)  # fmt: skip
                return 1
            done += 1
        if done * _SAMPLES >= len(memory.resident) * operations:
            memory.sample()
        if done - told >= _PROGRESS_OPERATIONS:
            told = done
            say(f"{done} operations, {memory.resident[-1] / 1e6:.0f} MB resident, "
                f"{memory.shared[-1] / 1e6:.0f} MB shared")  # fmt: skip
    # Of all processes: once all agree, none has anything left to find fault with.
    growth = _largest(mesh, memory.growth())
    grown = f"memory grew by {growth / 1e6:.1f} MB at most"
    if growth > _GROWTH_BYTES:
        say(f"soak: {what}: results right, but {grown}")
        return 1
    say(f"soak: {what}: all right; {grown}")
    return 0


def _largest(mesh, value):
    """Returns the largest of the processes' values."""
    mine = jax.make_array_from_callback(
        (mesh.devices.size,),
        jax.NamedSharding(mesh, jax.P(programs.AXES)),
        lambda _: np.full(1, value, np.int32),
    )
    most = models.over(mesh, lambda x: jaxcomm.pmax(x, programs.AXES))
    return int(np.asarray(most(mine).addressable_shards[0].data)[0])


def _arguments():
    parser = argparse.ArgumentParser(prog="python -m stress.worker")
    for name, default, about in (
        ("operations", 100_000, "how many calls"),
        ("programs", 40, "different programs; each takes time to compile"),
        ("seed", 1, "for everything that is chosen"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=about)
    return parser.parse_args()


if __name__ == "__main__":
    given = _arguments()
    sys.exit(main(given.operations, given.programs, given.seed))
