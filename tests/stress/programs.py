"""Compiled collectives, alike on all processes, and calls with fresh numbers."""

import math
from typing import NamedTuple

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
_NUMBERS = 1 << 23
_STRIDE = 104_729
# Bounds of a rank's operand in bytes, and the share of programs that stay below.
_SIZES = ((8, 0.2), (4 << 10, 0.7), (256 << 10, 0.93), (4 << 20, 1.0))
# Below these bounds sums of integers are exact, in whatever order; int8 wraps.
_EXACT_BELOW = {
    np.dtype(np.float32): 1 << 24,
    np.dtype(jax.numpy.bfloat16): 1 << 8,
    np.dtype(np.float16): 1 << 11,
    np.dtype(np.int32): 1 << 31,
    np.dtype(np.int8): 1 << 14,
}


def numbers(rng: np.random.Generator) -> np.ndarray:
    """Returns what operands are made of."""
    return rng.integers(1 << 16, size=_NUMBERS, dtype=np.uint32)


class Call(NamedTuple):
    """What comes of a call, and what must, by rank."""

    result: jax.Array
    expected: np.ndarray

    def difference(self) -> str | None:
        """Waits for the result and says in what it is wrong, None if in nothing."""
        for shard in self.result.addressable_shards:
            found, expected = np.asarray(shard.data), self.expected[shard.index]
            kinds = [f"{x.dtype}{list(x.shape[1:])}" for x in (found, expected)]
            if kinds[0] != kinds[1]:
                return f"on {shard.device}: {kinds[0]} instead of {kinds[1]}"
            for first in map(tuple, np.argwhere(found != expected).tolist()):
                return (
                    f"on {shard.device}: {np.sum(found != expected)} of {found.size} "
                    f"elements are wrong, the first at {list(first[1:])}: "
                    f"{found[first]} instead of {expected[first]}"
                )
        return None


class Program:
    """A jitted collective over some axes of a mesh, all else drawn.

    Attributes:
      text: what it does, for messages.
    """

    def __init__(
        self, mesh: jax.sharding.Mesh, number: int, rng: np.random.Generator
    ) -> None:
        """Compiles nothing yet: the first call does."""
        some = [AXES, AXES[:1], AXES[1:]] if mesh.shape["device"] > 1 else [AXES]
        self._mesh, self._axes = mesh, some[rng.integers(len(some))]
        size = math.prod(mesh.shape[axis] for axis in self._axes)
        self._case = list(CASES.values())[number % len(CASES)]
        self._choice = catalogue.drawn(size, rng)
        self._dtype = list(_EXACT_BELOW)[rng.integers(len(_EXACT_BELOW))]
        self._shape = (size, _bytes(rng) // (size * self._dtype.itemsize))
        lane = LANES[rng.integers(len(LANES))]

        def local(x):
            options = {"lane": lane}
            return self._case(jaxcomm, x[0], self._axes, self._choice, **options)[None]

        self._program = models.over(mesh, local, check_vma=False)
        self.text = (
            f"{self._case.name}({self._dtype.name}[{size},{self._shape[1]}]) over axes "
            f"{self._axes}, lane {lane!r}"
        )

    def call(self, numbers: np.ndarray, offset: int) -> Call:
        """Calls it on numbers that follow from an offset, other ones on each rank."""
        ranks, count = self._mesh.size, math.prod(self._shape)
        begins = (offset + np.arange(ranks) * _STRIDE) % (len(numbers) - count)
        rows = np.stack([numbers[begin : begin + count] for begin in begins])
        x = (rows % (_EXACT_BELOW[self._dtype] // ranks)).astype(self._dtype)
        x = x.reshape(ranks, *self._shape)
        sharding = jax.NamedSharding(self._mesh, jax.P(AXES))
        result = self._program(
            jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
        )
        model = self._case.model(self._choice)
        return Call(result, models.apply_by_group(self._mesh, self._axes, model, x))


def _bytes(rng):
    share = rng.random()
    kind = next(i for i, (_, below) in enumerate(_SIZES) if share < below)
    least = _SIZES[kind - 1][0] if kind else 1
    return int(np.exp(rng.uniform(np.log(least), np.log(_SIZES[kind][0]))))
