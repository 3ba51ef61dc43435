"""Every collective, beside the same made of XLA's own."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxcomm

AXIS = "i"
_ROOT = 1


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective, as the check runs it.

    Attributes:
      ours: function of a device's operand, a vector.
      theirs: the same by ``jax.lax`` alone.
      bus: bytes that cross a link of each device for a byte of ``size``, as
        nccl-tests counts them; a function of the number of devices. None if no bytes
        are to be counted.
      shares: whether ``size`` is that of the result, of which a device's operand is
        one part.
    """

    ours: Callable[[Any], Any]
    theirs: Callable[[Any], Any]
    bus: Callable[[int], float] | None
    shares: bool = False


def every(size: int) -> dict[str, Collective]:
    """Return all collectives for ``size`` devices, by name."""
    ring = [(rank, (rank + 1) % size) for rank in range(size)]

    def mine():
        return jax.lax.axis_index(AXIS)

    def gathered(x):
        return jax.lax.all_gather(x, AXIS)

    def on_root(x):
        return jnp.where(mine() == _ROOT, x, jnp.zeros_like(x))

    def part_of(x, index):
        return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)

    def twin(bus, name, *args, shares=False, **options):
        def of(lib):
            return lambda x: getattr(lib, name)(x, AXIS, *args, **options)

        return Collective(of(jaxcomm), of(jax.lax), bus, shares)

    def ragged(x):
        # Each rank sends its parts to the ranks in reverse order.
        part = x.shape[0] // size
        ranks = jnp.arange(size, dtype=jnp.int32)
        parts = jnp.full(size, part, jnp.int32)
        return jaxcomm.ragged_all_to_all(
            x, jnp.zeros_like(x), part * ranks[::-1], parts,
            jnp.full(size, part, jnp.int32) * mine(), parts, axis_name=AXIS,
        )  # fmt: skip

    def ragged_by_gathering(x):
        parts = gathered(x).reshape(size, size, -1)
        found = jax.lax.dynamic_index_in_dim(parts, size - 1 - mine(), 1)
        return found.reshape(x.shape)

    def signs(x):
        return jnp.where(x > 0, 1, -1).astype(x.dtype)

    def both(n):
        return 2 * (n - 1) / n

    def once(n):
        return (n - 1) / n

    def whole(n):
        return 1.0

    return {
        "psum": twin(both, "psum"),
        "pmean": twin(both, "pmean"),
        "pmax": twin(both, "pmax"),
        "pmin": twin(both, "pmin"),
        "pprod": Collective(
            lambda x: jaxcomm.pprod(signs(x), AXIS),
            lambda x: gathered(signs(x)).prod(0),
            both,
        ),
        "all_gather": twin(once, "all_gather", tiled=True, shares=True),
        "psum_scatter": twin(once, "psum_scatter", tiled=True),
        "all_to_all": twin(once, "all_to_all", 0, 0, tiled=True),
        "ragged_all_to_all": Collective(ragged, ragged_by_gathering, once),
        "ppermute": twin(whole, "ppermute", ring),
        "ring_shift": Collective(
            lambda x: jaxcomm.ring_shift(x, AXIS),
            lambda x: jax.lax.ppermute(x, AXIS, ring),
            whole,
        ),
        "pbroadcast": Collective(
            lambda x: jaxcomm.pbroadcast(x, AXIS, _ROOT),
            lambda x: gathered(x)[_ROOT],
            whole,
        ),
        "preduce": Collective(
            lambda x: jaxcomm.preduce(x, AXIS, root=_ROOT),
            lambda x: on_root(jax.lax.psum(x, AXIS)),
            whole,
        ),
        "pgather": Collective(
            lambda x: jaxcomm.pgather(x, AXIS, root=_ROOT, tiled=True),
            lambda x: on_root(jax.lax.all_gather(x, AXIS, tiled=True)),
            once,
            shares=True,
        ),
        "pscatter": Collective(
            lambda x: jaxcomm.pscatter(x.reshape(size, -1), AXIS, root=_ROOT),
            lambda x: part_of(gathered(x)[_ROOT].reshape(size, -1), mine()),
            once,
        ),
        "pscan": Collective(
            lambda x: jaxcomm.pscan(x, AXIS),
            lambda x: part_of(jnp.cumsum(gathered(x), 0), mine()),
            None,
        ),
        "pbarrier": Collective(lambda x: jaxcomm.pbarrier(x, AXIS), lambda x: x, None),
    }
