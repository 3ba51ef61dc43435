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


class InTurns:
    """A function of a float32 vector, to time; all processes of its mesh do the same.

    What else a machine does slows all sizes alike, since they take turns.

    Args:
      mesh: whose devices are split along all axes.
      function: calls one collective.
      sizes: bytes of a rank's operand.
    """

    def __init__(self, mesh, function: Callable, sizes: Sequence[int]):
        self._mesh = mesh
        self._sizes = sizes
        self._spec = jax.P(mesh.axis_names)
        # Compiled once, however often it is measured.
        self._program = jax.jit(
            jax.shard_map(
                lambda x: function(x)[None],
                mesh=mesh,
                in_specs=self._spec,
                out_specs=self._spec,
                check_vma=False,
            )
        )

    def measure(self, rounds: int) -> Times:
        """Time each size in as many rounds."""
        operands = {size: self._operand(size) for size in self._sizes}
        is_host = self._mesh.devices.flat[0].platform == "cpu"
        seconds = collections.defaultdict(list)
        # The first round may compile.
        for turn in range(rounds + 1):
            # Every second round in the opposite order.
            for size in list(operands)[:: -1 if turn % 2 else 1]:
                calls = 1 if is_host else _IN_A_ROW
                took = _seconds_of_a_call(self._program, operands[size], calls)
                if turn:
                    seconds[size].append(took)
        (member,) = jaxcomm.communicators()
        found = list(timed(records(self._mesh)))
        newest = max(one.entry.sequence for one in found)
        name = next(o.entry.collective for o in found if o.entry.sequence == newest)
        if is_host:
            own = newest - rounds * len(operands)
            found = [one for one in found if one.entry.sequence > own]
            seconds = _by_size(found, self._sizes)
        return Times(
            dict(seconds),
            member.transport if is_host else member.backend,
            name,
        )

    def _operand(self, size: int):
        whole = np.ones((self._mesh.size * size // 4,), np.float32)
        sharding = jax.NamedSharding(self._mesh, self._spec)
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
