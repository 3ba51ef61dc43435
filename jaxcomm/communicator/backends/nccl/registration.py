"""Which symmetric memory is registered with which communicator.

NCCL registers memory collectively. It hangs if one process registers a segment and
another does not, or registers another. So processes register when they make a pool or a
communicator, which they all do, and first compare what each is about to register.
"""

import hashlib
import json
import weakref
from collections.abc import Collection, Sequence

import jax

from jaxcomm._built import _ffi
from jaxcomm.communicator.backends.backend import processes_of
from jaxcomm.communicator.backends.nccl import agreement
from jaxcomm.errors import CommunicatorError

# Live pools, oldest first, and how many there ever were on the same devices, by these
# and their processes: by that number processes mean the same pool.
_pools: list[weakref.ref] = []
_made: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}


def device_ids(mesh: jax.sharding.Mesh) -> tuple[int, ...]:
    """Return the ids of a mesh's devices, in order."""
    return tuple(sorted(device.id for device in mesh.devices.flat))


def add(pool) -> int:
    """Remember a pool as long as it lives; return its number on its devices."""
    _pools.append(weakref.ref(pool))
    place = device_ids(pool.mesh), processes_of(pool.mesh)
    _made[place] = _made.get(place, 0) + 1
    return _made[place]


def forget(taken: Collection[int]) -> None:
    """Register no pool any more that processes share which were started again.

    They have none of these pools, and count theirs from the beginning. So the others
    count theirs anew, too.
    """
    for pool in pools():
        if not {*taken}.isdisjoint(processes_of(pool.mesh)):
            _pools.remove(weakref.ref(pool))
            pool._leave_out("jaxcomm.grow took in a process without it; make another")
    for place in [each for each in _made if not {*taken}.isdisjoint(each[1])]:
        del _made[place]


def pools(mesh: jax.sharding.Mesh | None = None) -> list:
    """Return the live pools, those on the devices of a mesh or all, oldest first."""
    _pools[:] = [ref for ref in _pools if ref() is not None]
    found = [ref() for ref in _pools]
    return [
        pool
        for pool in found
        if pool is not None
        and not pool.closed
        and (mesh is None or device_ids(pool.mesh) == device_ids(mesh))
    ]


def bytes_with(key: int) -> int:
    """Return the bytes, on local devices, of pools registered with a communicator."""
    return sum(pool.local_bytes for pool in pools() if pool.is_registered_with(key))


def register(pool, keys: Sequence[int]) -> dict[int, str]:
    """Register a pool with communicators; every process of its mesh calls this.

    Returns:
      How it is registered with each, or why it is not, by key. The first is alike on
      all processes.

    Raises:
      CommunicatorError: on all processes, if one cannot register or means another pool.
    """
    what = [(pool.number, pool.bytes, key) for key in keys]
    mine = [len(what), hashlib.sha256(json.dumps(what).encode()).hexdigest()]
    answers = agreement.exchange(pool.mesh, "symmetric", mine)
    if len({tuple(answer) for answer in answers.values()}) > 1:
        counts = ", ".join(
            f"process {process}: {count} registrations, hash {digest[:8]}"
            for process, (count, digest) in answers.items()
        )
        raise CommunicatorError(
            f"the processes are about to register different symmetric memory, or in "
            f"different order ({counts}). Make the same SymmetricPool objects and "
            f"communicators on every process, in the same order; nothing was registered"
        )
    how = []
    refused = None
    try:
        how = [_ffi.register_memory(key, pool.memory) for key in keys]
    except RuntimeError as error:
        refused = str(error)
    agreement.check_none_refused(pool.mesh, "registering symmetric memory", refused)
    answers = agreement.exchange(pool.mesh, "how it is registered", how)
    return {
        key: _agreed(pool, key, {process: each[i] for process, each in answers.items()})
        for i, key in enumerate(keys)
    }


def is_registered(how: str) -> bool:
    """Return whether collectives may use what is registered so."""
    return how == "window" or how.startswith("buffer: ")


def _kind(how: str) -> str | None:
    return how.split(":")[0] if is_registered(how) else None


def _agreed(pool, key: int, answers: dict[int, str]) -> str:
    """Return how a pool is registered; undo it if processes have it differently.

    Ranks choose engines by it, and would wait for each other.
    """
    mine = answers[jax.process_index()]
    if len(set(map(_kind, answers.values()))) == 1:
        return mine
    if is_registered(mine):
        _ffi.deregister_memory(key, pool.memory)
    each = "; ".join(f"process {process}: {how}" for process, how in answers.items())
    return f"not alike on all processes: {each}"
