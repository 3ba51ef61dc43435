"""The backends, and which of them serves a partition.

A decision that differed between processes would be a deadlock. So it depends on the
arguments, on the environment, which must be the same everywhere, and on what all
processes of the mesh published.
"""

import sys

import jax

from jaxcomm import config
from jaxcomm._built import ABSENCE
from jaxcomm.communicator.backends.backend import Backend as Backend
from jaxcomm.communicator.backends.backend import CommunicatorSpec as CommunicatorSpec
from jaxcomm.communicator.backends.backend import Connection as Connection
from jaxcomm.communicator.backends.backend import processes_of
from jaxcomm.communicator.backends.host import HostBackend
from jaxcomm.communicator.backends.nccl.backend import NcclBackend
from jaxcomm.communicator.backends.xla import AbsentBackend, XlaBackend
from jaxcomm.communicator.policy import CommPolicy
from jaxcomm.communicator.replica_groups import Partition
from jaxcomm.errors import CommunicatorError

# In this order they are asked whether they serve a platform.
BACKENDS: dict[str, Backend] = {}


def register(backend: Backend) -> None:
    """Add a backend that users can choose by its name.

    Its platforms must be known before the collectives are imported: lowering is
    registered for the platforms that backends have then.
    """
    if backend.name in BACKENDS:
        raise ValueError(f"there is a backend {backend.name!r} already")
    BACKENDS[backend.name] = backend


for _ours in (HostBackend(), NcclBackend()):
    register(AbsentBackend(_ours) if ABSENCE else _ours)
# Why XLA had to serve in place of a backend, so far.
_said: set[str] = set()
_XLA = XlaBackend()
register(_XLA)
NAMES = tuple(BACKENDS)


def choose(
    mesh: jax.sharding.Mesh, partition: Partition, lane: str, backend: str | None
) -> tuple[Backend, str]:
    """Return what serves the partition of a mesh.

    If nobody chose a backend and the platform's own cannot serve, XLA does. Processes
    may have to meet first: each process of the mesh must ask. A process that has no
    device in it never runs its programs: there XLA's collectives stand for all.

    Returns:
      The backend; and why it is XLA in place of the platform's own, else "".

    Raises:
      CommunicatorError: the backend that was chosen cannot serve; or the platform's own
        cannot, and the job is elastic.
    """
    me = jax.process_index()
    if me not in processes_of(mesh):
        return _XLA, f"process {me} has no device in the mesh"
    backend = config.BACKEND if backend is None else backend
    if backend is None:
        return _by_platform(mesh, partition)
    found = named(backend)
    refusal = found.refusal(mesh, partition)
    if refusal is None:
        return found, ""
    raise CommunicatorError(
        f"backend {backend!r} cannot join the groups of axes {partition.axes} (lane "
        f"{lane!r}): {refusal}. Use backend='xla', or None to let the platform choose."
    )


def check_name(name: object) -> None:
    """Raise ValueError if there is no backend of a name."""
    if name not in tuple(BACKENDS):  # which also compares what cannot be a key
        raise ValueError(
            f"backend {name!r} is unknown; choose one of {tuple(BACKENDS)}, or None to "
            f"let the platform choose"
        )


def named(name: str) -> Backend:
    """Return the backend of a name.

    Raises:
      ValueError: if there is none.
    """
    check_name(name)
    return BACKENDS[name]


def check_policy(backend: str | None, policy: CommPolicy | None) -> None:
    """Raise ValueError if somebody chose a policy and a backend that takes none.

    If the platform chooses the backend, it may leave the policy aside: one program
    serves GPUs and CPU devices.
    """
    if backend is None or policy is None or named(backend).takes_policy:
        return
    takers = " or ".join(repr(b.name) for b in BACKENDS.values() if b.takes_policy)
    raise ValueError(
        f"init: backend {backend!r} takes no policy, got {policy}. Leave the policy "
        f"out, or choose backend={takers}, or None to let the platform choose"
    )


def orders_lanes(name: str) -> bool:
    """Return whether a backend runs operations of one lane one after the other.

    Args:
      name: as a flight record has it; it may be of another version of this package.
    """
    return name in BACKENDS and named(name).orders_lanes


def ffi_platform(platform: str) -> str:
    """Return the name by which ``jax.ffi`` knows a platform of devices.

    >>> ffi_platform("cpu"), ffi_platform("gpu")
    ('cpu', 'CUDA')
    """
    for each in BACKENDS.values():
        if platform in each.platforms:
            return each.ffi_platform
    return platform


def lowering_platforms() -> tuple[str, ...]:
    """Return the platforms for which custom calls are lowered.

    >>> lowering_platforms()
    ('cpu', 'cuda')
    """
    found = (each.ffi_platform.lower() for each in BACKENDS.values() if each.is_ours)
    return tuple(dict.fromkeys(name for name in found if name))


def check_xla_serves(backend: str | None, where: str) -> None:
    """Raise CommunicatorError if a call that XLA is to serve was for another backend.

    XLA serves programs for platforms that no backend has.

    Args:
      backend: that the call chose. If None, the environment's.
    """
    asked = config.BACKEND if backend is None else backend
    if asked is not None and named(asked) is not _XLA:
        raise CommunicatorError(
            f"{where}: backend {asked!r} was asked for, and this program is lowered "
            f"for a platform that only XLA's collectives serve. Use backend='xla', or "
            f"None to let the platform choose."
        )


def _by_platform(mesh: jax.sharding.Mesh, partition: Partition) -> tuple[Backend, str]:
    platform = mesh.devices.flat[0].platform
    for each in BACKENDS.values():
        if platform in each.platforms:
            refusal = each.refusal(mesh, partition)
            if refusal is None:
                return each, ""
            _fall_back(mesh, partition, each, refusal)
            return _XLA, refusal
    return _XLA, ""


def _fall_back(
    mesh: jax.sharding.Mesh, partition: Partition, own: Backend, refusal: str
) -> None:
    """Say once for the job that XLA serves several processes in place of a backend.

    Raises:
      CommunicatorError: the job is elastic, and its survivors would hang.
    """
    processes = processes_of(mesh)
    if len(processes) == 1:
        return
    where = (
        f"backend {own.name!r} cannot join processes over axes {partition.axes}: "
        f"{refusal}"
    )
    if config.is_elastic():
        raise CommunicatorError(
            f"{where}. The job is elastic, and in XLA's collectives survivors of a "
            f"process that ends hang. Mend that, or choose backend='xla' yourself"
        )
    if refusal not in _said and jax.process_index() == processes[0]:
        print(
            f"jaxcomm: {where}. XLA's collectives serve, in which ranks hang if a "
            f"process ends, or if they disagree",
            file=sys.stderr,
            flush=True,
        )
    _said.add(refusal)
