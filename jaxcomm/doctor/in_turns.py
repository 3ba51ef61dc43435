"""Times of a collective at several sizes, measured in turns."""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

import jaxcomm
from jaxcomm.communicator import rendezvous
from jaxcomm.communicator.backends.backend import processes_of
from jaxcomm.diagnostics import record
from jaxcomm.diagnostics.timing import timed

# Calls of one sample on GPUs.
_IN_A_ROW = 10


@dataclasses.dataclass(frozen=True)
class Times:
    """What a collective took.

    Attributes:
      seconds: of each round, by the bytes of a rank's operand.
      transport: what carried it.
      collective: its name in the flight record.
    """

    seconds: dict[int, list[float]]
    transport: str
    collective: str


def measure(mesh, function: Callable, sizes: Sequence[int], rounds: int) -> Times:
    """Time a function of a float32 vector; every process of the mesh calls this.

    What else the machine does slows all sizes alike, since they take turns. The
    communicators end with it.

    Args:
      mesh: whose devices are split along all axes.
      function: calls one collective.
      sizes: bytes of a rank's operand.
      rounds: how often each size is timed.
    """
    every = jax.P(mesh.axis_names)
    program = jax.jit(
        jax.shard_map(
            lambda x: function(x)[None],
            mesh=mesh,
            in_specs=every,
            out_specs=every,
            check_vma=False,
        )
    )
    operands = {size: _operand(mesh, every, size) for size in sizes}
    is_host = mesh.devices.flat[0].platform == "cpu"
    seconds = collections.defaultdict(list)
    # The first round compiles.
    for turn in range(rounds + 1):
        # Every second round in the opposite order.
        for size in list(operands)[:: -1 if turn % 2 else 1]:
            calls = 1 if is_host else _IN_A_ROW
            seconds[size].append(_seconds_of_a_call(program, operands[size], calls))
    (member,) = jaxcomm.communicators()
    found = list(timed(records(mesh)))
    if is_host:
        seconds = _by_size(found, sizes)
    jaxcomm.finalize()
    return Times(
        {size: took[1:] for size, took in seconds.items()},
        member.transport if is_host else member.backend,
        found[-1].entry.collective,
    )


def _operand(mesh, spec, size: int):
    whole = np.ones((mesh.size * size // 4,), np.float32)
    sharding = jax.NamedSharding(mesh, spec)
    return jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)


def _by_size(found, sizes) -> dict[int, list[float]]:
    """Return the seconds on record; some collectives record their results' bytes."""
    # Of the oldest operations, some ranks' entries may be gone.
    full = max(one.seen for one in found)
    recorded = sorted({one.entry.bytes for one in found})
    size_of = dict(zip(recorded, sorted(sizes), strict=True))
    seconds = collections.defaultdict(list)
    for one in found:
        if one.seen == full:
            seconds[size_of[one.entry.bytes]].append(one.seconds)
    return seconds


def _seconds_of_a_call(program: Callable, x, calls: int) -> float:
    """Return the seconds of each of several calls in a row.

    For GPUs: their flight record has the time at which somebody looked.
    """
    began = time.perf_counter()
    results = [program(x) for _ in range(calls)]
    jax.block_until_ready(results)
    return (time.perf_counter() - began) / calls


def records(mesh) -> list[record.ProcessRecord]:
    """Return the flight records of all processes of a mesh; each must call this."""
    mine = jaxcomm.flight_record().to_json()
    processes = processes_of(mesh)
    if len(processes) == 1:
        return [record.parse(mine)]
    every = rendezvous.exchange(processes, jax.process_index(), "flight records", mine)
    return [record.parse(each) for each in every.values()]
