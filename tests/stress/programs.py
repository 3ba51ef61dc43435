"""Compiled collectives, alike on all processes, and calls with fresh numbers."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import catalogue
import jax
import numpy as np

import jaxcomm

AXES = ("process", "device")
LANES = ("default", "second")
MOST_BYTES = 4 << 20

# What ranks are given are pieces of one list; the prime keeps those of a call apart.
_NUMBERS = 1 << 23
_STRIDE = 104_729
# Bounds of a rank's operand in bytes, and the share of programs that stay below.
_SIZES = ((8, 0.2), (4 << 10, 0.7), (256 << 10, 0.93), (MOST_BYTES, 1.0))
# Below these bounds sums of integers are exact, in whatever order; int8 wraps.
_EXACT_BELOW = {
    np.dtype(np.float32): 1 << 24,
    np.dtype(jax.numpy.bfloat16): 1 << 8,
    np.dtype(np.float16): 1 << 11,
    np.dtype(np.int32): 1 << 31,
    np.dtype(np.int8): 1 << 14,
}


@dataclasses.dataclass(frozen=True)
class Operation:
    """A collective with a choice of root or distance made.

    Operands have shape (n, k) on each of n ranks. A model takes those of all ranks,
    shape (n, n, k), and returns the results by rank.

    Attributes:
      call: takes the operand, the axes and keyword options.
      model: takes all operands and returns all results.
    """

    call: Callable[..., Any]
    model: Callable[[np.ndarray], np.ndarray]


def operations(size: int, rng: np.random.Generator) -> dict[str, Operation]:
    """Return every collective whose results are exact, for groups of a size, by name.

    Args:
      size: ranks of a group.
      rng: chooses roots, distances and permutations.
    """
    choice = catalogue.drawn(size, rng)

    def call(case, x, axes, **options):
        return case(jaxcomm, x, axes, choice, **options)

    return {
        name: Operation(functools.partial(call, case), case.model(choice))
        for name, case in catalogue.CASES.items()
        # Products grow past what is exact, and columns may be of any number.
        if case.kind in ("move", "sum", "extreme") and not case.cuts_columns
    }


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that was made.

    Attributes:
      result: what comes of it.
      expected: what must come of it, by id of this process's devices.
    """

    result: jax.Array
    expected: dict[int, np.ndarray]

    def difference(self) -> str | None:
        """Waits for the result and says in what it is wrong, None if in nothing."""
        for shard in self.result.addressable_shards:
            found, expected = np.asarray(shard.data)[0], self.expected[shard.device.id]
            kinds = [f"{x.dtype}{list(x.shape)}" for x in (found, expected)]
            if kinds[0] != kinds[1]:
                return f"on {shard.device}: {kinds[0]} instead of {kinds[1]}"
            for first in map(tuple, np.argwhere(found != expected).tolist()):
                return (
                    f"on {shard.device}: {np.sum(found != expected)} of {found.size} "
                    f"elements are wrong, the first at {list(first)}: {found[first]} "
                    f"instead of {expected[first]}"
                )
        return None


class Program:
    """A jitted collective over some axes of a mesh.

    Args:
      mesh: over ``AXES``.
      name: of the operation.
      operation: what to call, and its model.
      axes: those to communicate over.
      lane: the lane to go through.
      dtype: one of those whose sums are known to be exact.
      columns: of each operand, which has a row for each rank of the group.

    Attributes:
      text: what it does, for messages.
    """

    def __init__(self, mesh, name, operation, axes, lane, dtype, columns):
        """Compiles nothing yet: the first call does."""
        grid = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
        groups = {
            AXES: grid.reshape(1, -1), AXES[:1]: grid.T, AXES[1:]: grid
        }[axes]  # fmt: skip
        self._groups = groups
        self._here = {
            rank: device
            for rank, device in enumerate(mesh.devices.flat)
            if device.process_index == jax.process_index()
        }
        self._dtype = dtype
        self._below = _EXACT_BELOW[dtype] // mesh.devices.size
        self._shape = (groups.shape[1], columns)
        self._sharding = jax.NamedSharding(mesh, jax.P(AXES))
        self._model = operation.model
        self._program = jax.jit(
            jax.shard_map(
                lambda x: operation.call(x[0], axes, lane=lane)[None],
                mesh=mesh,
                in_specs=jax.P(AXES),
                out_specs=jax.P(AXES),
                check_vma=False,
            )
        )
        self.text = (
            f"{name}({dtype.name}[{self._shape[0]},{columns}]) over axes {axes}, "
            f"lane {lane!r}"
        )

    def call(self, numbers: np.ndarray, offset: int) -> Call:
        """Calls it on numbers that follow from an offset, other ones on each rank."""
        operands = {
            rank: self._operand(numbers, offset + rank * _STRIDE)
            for group in self._groups
            if self._here.keys() & set(group.tolist())
            for rank in group.tolist()
        }
        x = jax.make_array_from_single_device_arrays(
            (self._groups.size, *self._shape),
            self._sharding,
            [
                jax.device_put(operands[rank][None], device)
                for rank, device in self._here.items()
            ],
        )
        result = self._program(x)
        expected = {}
        for group in self._groups:
            members = group.tolist()
            if members[0] not in operands:
                continue
            results = self._model(np.stack([operands[rank] for rank in members]))
            for rank, value in zip(members, results, strict=True):
                if rank in self._here:
                    expected[self._here[rank].id] = value
        return Call(result, expected)

    def _operand(self, numbers, offset):
        count = math.prod(self._shape)
        begin = offset % (len(numbers) - count)
        piece = numbers[begin : begin + count] % self._below
        return piece.astype(self._dtype).reshape(self._shape)


def numbers(rng: np.random.Generator) -> np.ndarray:
    """Returns what operands are made of."""
    return rng.integers(1 << 16, size=_NUMBERS, dtype=np.uint32)


def pool(
    mesh: jax.sharding.Mesh, count: int, rng: np.random.Generator
) -> list[Program]:
    """Returns programs of all operations, sizes, dtypes, axes and lanes, mixed.

    Args:
      mesh: over ``AXES``.
      count: how many; from 24 on, every operation is there.
      rng: chooses the rest.
    """
    axes_of = [AXES, AXES[:1], AXES[1:]] if mesh.shape["device"] > 1 else [AXES]
    made = []
    for number in range(count):
        axes = axes_of[rng.integers(len(axes_of))]
        size = math.prod(mesh.shape[axis] for axis in axes)
        operation_of = operations(size, rng)
        name = list(operation_of)[number % len(operation_of)]
        dtype = list(_EXACT_BELOW)[rng.integers(len(_EXACT_BELOW))]
        made.append(
            Program(
                mesh,
                name,
                operation_of[name],
                axes,
                LANES[rng.integers(len(LANES))],
                dtype,
                _bytes(rng) // (size * dtype.itemsize),
            )
        )
    return made


def _bytes(rng):
    share = rng.random()
    kind = next(i for i, (_, below) in enumerate(_SIZES) if share < below)
    least = _SIZES[kind - 1][0] if kind else 1
    return int(np.exp(rng.uniform(np.log(least), np.log(_SIZES[kind][0]))))
