"""The operations, and what each rank's result must be, number for number.

Operands are small whole numbers, so that float32 holds every result exactly, in TF32
products too: a result is right or wrong, without a tolerance.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from models import over

import jaxcomm

AXIS = "i"
RANKS = 2
# In the memory of every result before the run. No operand or result holds it.
STALE = -777
_WIDTH = 512  # of the weights


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large things are.

    Attributes:
      large: elements of an operand that NCCL takes, on every rank.
      small: of one that the kernel for small sums takes.
      rows: of a matrix that keeps a device busy.
      side: of the square matrix it is multiplied with.
      turns: how many of these products take some seconds on a GPU.
    """

    large: int
    small: int
    rows: int
    side: int
    turns: int


# 16 MiB and 1 KiB. Such a product takes an H100 about 11 ms in float32. All turns fit
# into a stream's queue, which holds 1024 things: each is a product, a copy and a count.
GPU_SIZES = Sizes(large=1 << 22, small=256, rows=4096, side=8192, turns=200)
# 6 MiB: over 4 MiB, up to which our kernels serve, and from which on copy engines send
# what is started.
CPU_SIZES = Sizes(large=3 << 19, small=256, rows=128, side=128, turns=1000)


@dataclasses.dataclass(frozen=True)
class Operation:
    """A collective in a program.

    Attributes:
      name: of the collective, as errors must name it.
      run: what a rank does with its block.
      expected: the ranks' results below one another, for the ranks' operands.
      small: whether the operand is small.
      dtype: of operand and result.
    """

    name: str
    run: Callable
    expected: Callable
    small: bool = False
    dtype: type = np.float32


def _psum(x):
    return jaxcomm.psum(x, AXIS)


def _weights(module):
    return module.arange(_WIDTH * _WIDTH).reshape(_WIDTH, _WIDTH) * 7 % 11 % 4


def _product(x):
    return _psum(x).reshape(-1, _WIDTH) @ _weights(jnp).astype(x.dtype)


def _sums(rows):
    return np.tile(rows.sum(0, dtype=rows.dtype), (RANKS, 1))


def _products(rows):
    one = _sums(rows)[0].reshape(-1, _WIDTH) @ _weights(np).astype(rows.dtype)
    return np.tile(one, (RANKS, 1))


OPERATIONS = {
    "psum_large": Operation("psum", _psum, _sums),
    "psum_small": Operation("psum", _psum, _sums, small=True),
    "psum_of_integers": Operation("psum", _psum, _sums, dtype=np.int32),
    "all_gather": Operation(
        "all_gather",
        lambda x: jaxcomm.all_gather(x, AXIS, tiled=True),
        lambda rows: np.tile(rows, (RANKS, 1)),
    ),
    "ppermute": Operation(
        "ppermute",
        lambda x: jaxcomm.ppermute(x, AXIS, [(0, 1), (1, 0)]),
        lambda rows: rows[::-1],
    ),
    "all_to_all": Operation(
        "all_to_all",
        lambda x: jaxcomm.all_to_all(x, AXIS, 1, 1, tiled=True),
        lambda rows: rows.reshape(RANKS, RANKS, -1).swapaxes(0, 1).reshape(RANKS, -1),
    ),
    "pair": Operation("psum", lambda x: jaxcomm.psum_start(x, AXIS).done(), _sums),
    "hop": Operation(
        "ring_shift",
        lambda x: jaxcomm.ring_shift_start(x, AXIS).done(),
        lambda rows: rows[::-1],
    ),
    "product": Operation("psum", _product, _products),
}


def operands(operation: Operation, sizes: Sizes, seed: int) -> np.ndarray:
    count = sizes.small if operation.small else sizes.large
    each = np.arange(count, dtype=np.int32) % 251
    rows = [(each * (rank + 2) + 17 * seed + rank) % 239 + 1 for rank in range(RANKS)]
    return np.stack(rows).astype(operation.dtype)


def spread(mesh, rows: np.ndarray):
    return jax.make_array_from_callback(
        rows.shape,
        jax.NamedSharding(mesh, jax.P(AXIS)),
        lambda where: np.ascontiguousarray(rows[where]),
    )


def filled(mesh, like: np.ndarray, count: int) -> list:
    """Return arrays shaped as ``like`` and full of STALE.

    Made by the devices: JAX on CPU would not overwrite memory that numpy may own.
    """
    fill = jax.jit(
        lambda: jnp.full(like.shape, STALE, like.dtype),
        out_shardings=jax.NamedSharding(mesh, jax.P(AXIS)),
    )
    return [fill() for _ in range(count)]


def jitted(mesh, local):
    """Return ``local`` of every rank as a program that overwrites what is given first.

    The first argument's memory becomes that of the first result: what it holds is what
    a reader finds if nobody writes the result.
    """
    mapped = over(mesh, lambda _, *blocks: local(*blocks), check_vma=False, jit=False)
    return jax.jit(mapped, donate_argnums=0, keep_unused=True)


def busy(y, turns: int):
    """Keep a device busy: as many exact products, each of which shifts columns."""
    side = y.shape[1]
    shift = jnp.roll(jnp.eye(side, dtype=y.dtype), 1, axis=1)

    def turn(_, y):
        return jnp.matmul(y, shift, precision=jax.lax.Precision.HIGHEST)

    return jax.lax.fori_loop(0, turns, turn, y)


def busy_rows(sizes: Sizes) -> np.ndarray:
    one = np.arange(sizes.rows * sizes.side, dtype=np.int32) % 239 + 1
    rows = one.astype(np.float32).reshape(sizes.rows, sizes.side)
    return np.tile(rows, (RANKS, 1))


def shifted(sizes: Sizes) -> np.ndarray:
    return np.roll(busy_rows(sizes), sizes.turns, axis=1)
