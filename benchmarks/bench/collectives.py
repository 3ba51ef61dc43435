"""One collective in one jit, ours against jax.lax."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp

import jaxcomm
from bench import devices as on
from bench import targets
from bench.cases import TimedCase
from bench.rows import LAX, OURS
from bench.targets import KIB, MIB

SUITE = "collectives"
FLOOR = "dispatch floor"
FLOOR_VARIANT = "x + 1"
DEVICES = (2, 4, 8)
SIZES = (256, 4 * KIB, 64 * KIB, MIB, 16 * MIB)
_LARGEST_ITEM_BYTES = 4
_SPLIT = jax.P(on.AXIS)


@dataclasses.dataclass(frozen=True)
class _Op:
    """How to call a collective.

    Attributes:
      call: applies that of a module, ``jaxcomm`` or ``jax.lax``, to a 1-D operand.
      growth: bytes of the result over bytes of the operand on one device, given the
        number of devices.
      out_spec: how the result is split.
      dtype: of the operand.
    """

    call: Callable
    growth: Callable[[int], float] = lambda size: 1
    out_spec: jax.sharding.PartitionSpec = _SPLIT
    dtype: str = "float32"


def _reduction(name, dtype="float32"):
    return _Op(
        lambda module, x: getattr(module, name)(x, on.AXIS),
        out_spec=jax.P(),
        dtype=dtype,
    )


def _next_rank(module, x):
    size = jax.lax.axis_size(on.AXIS)
    return module.ppermute(x, on.AXIS, [(i, (i + 1) % size) for i in range(size)])


OPS = {
    "psum": _reduction("psum"),
    "pmax": _reduction("pmax"),
    "all_gather": _Op(
        lambda module, x: module.all_gather(x, on.AXIS, tiled=True),
        growth=lambda size: size,
    ),
    "psum_scatter": _Op(
        lambda module, x: module.psum_scatter(x, on.AXIS, tiled=True),
        growth=lambda size: 1 / size,
    ),
    "all_to_all": _Op(
        lambda module, x: module.all_to_all(x, on.AXIS, 0, 0, tiled=True)
    ),
    "ppermute": _Op(_next_rank),
    "psum_bf16": _reduction("psum", "bfloat16"),
    "psum_reproducible": _Op(
        lambda module, x: module.psum(
            x, on.AXIS, **({"reproducible": True} if module is jaxcomm else {})
        ),
        out_spec=jax.P(),
    ),
    "pmin": _reduction("pmin"),
    "pmean": _reduction("pmean"),
}
_NOT_BY_DEFAULT = ("psum_reproducible", "pmin", "pmean")
DEFAULT_OPS = tuple(name for name in OPS if name not in _NOT_BY_DEFAULT)


def cases(
    devices: Sequence[int] = DEVICES,
    sizes: Sequence[int] = SIZES,
    ops: Sequence[str] = DEFAULT_OPS,
) -> Iterator[TimedCase]:
    """Yield a case for each op, size and mesh, and the dispatch floor of each size.

    Args:
      devices: sizes of the meshes.
      sizes: bytes of each device's operand, rounded up to whole slices.
      ops: keys of ``OPS``.
    """
    for count in devices:
        # An element or more of each operand for every rank.
        slices = _LARGEST_ITEM_BYTES * count
        for size in sizes:
            size = -(-size // slices) * slices
            yield _floor(count, size)
            for name in ops:
                yield _case(name, count, size)


def _case(name, count, size):
    op = OPS[name]
    return TimedCase(
        suite=SUITE,
        name=name,
        devices=count,
        dtype=op.dtype,
        payload_bytes=size,
        # Read every operand and write every result once: less is not possible.
        work=count * size * (1 + op.growth(count)),
        target=targets.for_collective(name, size, count),
        build=lambda: _start(
            {
                OURS: functools.partial(op.call, jaxcomm),
                LAX: functools.partial(op.call, jax.lax),
            },
            op,
            count,
            size,
        ),
    )


def _floor(count, size):
    op = _Op(lambda x: x + 1)
    return TimedCase(
        suite=SUITE,
        name=FLOOR,
        devices=count,
        payload_bytes=size,
        work=2 * count * size,
        build=lambda: _start({FLOOR_VARIANT: op.call}, op, count, size),
    )


def _start(functions, op, count, size):
    mesh = on.mesh_of(count)
    dtype = jnp.dtype(op.dtype)
    shape = (count * size // dtype.itemsize,)
    x = on.place(on.small_integers(shape, dtype), mesh, _SPLIT)
    split = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=_SPLIT, out_specs=op.out_spec
    )
    return {
        name: functools.partial(jax.jit(split(function)), x)
        for name, function in functions.items()
    }
