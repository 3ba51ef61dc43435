"""Fifty dependent small sums in one jit: what one collective costs inside a program."""

import functools
from collections.abc import Iterator, Sequence

import jax

import jaxcomm
from bench import devices as on
from bench import targets
from bench.cases import TimedCase
from bench.rows import LAX, OURS

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
                    functools.partial(chain_over_axis, psum),
                    mesh=mesh,
                    in_specs=split,
                    out_specs=split,
                )
            ),
            x,
        )
        for label, psum in ((OURS, jaxcomm.psum), (LAX, jax.lax.psum))
    }


def chain(psum, x, *, rank, size):
    """Replace every rank's x by its share of the sum, fifty times.

    The shares differ between ranks: the sum of something equal everywhere could be had
    without communication. A step uses nothing but the sum just made, lest XLA compute
    it from all earlier sums anew.

    Args:
      psum: sums its argument over all ranks.
      x: float32, of this rank.
      rank: of this rank, from 0.
      size: how many ranks there are.

    Returns:
      Like x.
    """
    share = 2 * (rank + 1) / (size * (size + 1))  # of all ranks, 1
    for _ in range(LENGTH):
        x = psum(x) * share
    return x


def chain_over_axis(psum, x):
    """Do so over the mesh axis.

    Args:
      psum: ``jaxcomm.psum`` or its twin.
      x: float32, of this rank.

    Returns:
      Like x.
    """
    return chain(
        lambda x: psum(x, on.AXIS),
        x,
        rank=jax.lax.axis_index(on.AXIS),
        size=jax.lax.axis_size(on.AXIS),
    )
