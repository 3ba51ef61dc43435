"""Fifty dependent small sums in one jit: what one collective costs inside a program."""

import functools
from collections.abc import Iterator, Sequence

import jax

import jaxcomm
from jaxcomm.bench import devices as on
from jaxcomm.bench import targets
from jaxcomm.bench.cases import TimedCase
from jaxcomm.bench.rows import LAX, OURS

SUITE = "chain"
DEVICES = (2, 8)
LENGTH = 50
PAYLOAD_BYTES = 256
# Float32 sums in another order, fifty times.
_TOLERANCE = 1e-4


def cases(devices: Sequence[int] = DEVICES) -> Iterator[TimedCase]:
    """Yield a case for each mesh.

    Args:
      devices: sizes of the meshes.
    """
    for count in devices:
        yield TimedCase(
            suite=SUITE,
            name=f"{LENGTH} dependent psums",
            devices=count,
            payload_bytes=PAYLOAD_BYTES,
            work=2 * LENGTH * count * PAYLOAD_BYTES,
            target=targets.for_chain(count),
            tolerance=_TOLERANCE,
            build=functools.partial(_build, count),
        )


def _build(count):
    mesh = on.mesh_of(count)
    split = jax.P(on.AXIS)
    x = on.place(on.normal((count * PAYLOAD_BYTES // 4,), seed=0), mesh, split)
    return {
        label: functools.partial(
            jax.jit(
                jax.shard_map(
                    functools.partial(chain, psum),
                    mesh=mesh,
                    in_specs=split,
                    out_specs=split,
                )
            ),
            x,
        )
        for label, psum in ((OURS, jaxcomm.psum), (LAX, jax.lax.psum))
    }


def chain(psum, x):
    """Move every rank's x halfway to the mean, fifty times.

    The result of a step differs between ranks: the sum of something equal everywhere
    could be had without communication.

    Args:
      psum: ``jaxcomm.psum`` or its twin.
      x: float32, of this rank.

    Returns:
      Like x.
    """
    size = jax.lax.axis_size(on.AXIS)
    for _ in range(LENGTH):
        x = (x + psum(x, on.AXIS) / size) * 0.5
    return x
