"""The live communicators of this process.

One communicator serves one partition: the devices of a mesh, divided into groups by
some of its axes. :func:`jaxcomm.init` makes it, or the lowering of a program that needs
it. Running a program never makes one.
"""

import os
import threading
from collections.abc import Sequence

import jax

from jaxcomm import config
from jaxcomm.communicator import backends, extension, replica_groups
from jaxcomm.communicator.backends.backend import CommunicatorSpec
from jaxcomm.communicator.choices import Choice, Choices
from jaxcomm.communicator.communicator import Communicator
from jaxcomm.communicator.lane import DEFAULT_LANE, check_lane
from jaxcomm.communicator.policy import CommPolicy
from jaxcomm.communicator.replica_groups import IndexGroups, Partition
from jaxcomm.communicator.table import Communicators
from jaxcomm.errors import CommunicatorError

# All below require it.
_lock = threading.RLock()
_live: dict[int, Communicator] = {}
_choices = Choices()
# What was asked for, and the spec that came of it.
_specs: dict[tuple, CommunicatorSpec] = {}
_counts = {"created": 0, "split": 0, "borrowed": 0, "destroyed": 0}


def make_all(
    mesh: jax.sharding.Mesh,
    partitions: Sequence[Partition],
    lanes: Sequence[str],
    choice: Choice,
) -> Communicators:
    """Find or make a communicator for each partition and lane; remember the choice."""
    grid = replica_groups.grid_of(mesh)
    found = []
    with _lock:
        for partition in partitions:
            for lane in lanes:
                member = get(_spec(mesh, partition, lane, choice))
                _check_timeout(member, choice.timeout)
                _choices.record(grid, partition, lane, choice)
                found.append(member)
    return Communicators(found)


def for_lowering(
    mesh: jax.sharding.Mesh,
    axes: tuple[str, ...],
    index_groups: IndexGroups,
    lane: str | None,
    backend: str | None,
) -> Communicator:
    """Return the communicator that a program being lowered needs, made if missing."""
    lane = DEFAULT_LANE if lane is None else lane
    check_lane(lane, "lane")
    grid = replica_groups.grid_of(mesh)
    partition = replica_groups.partition(grid, axes, index_groups)
    with _lock:
        _choices.check_lane(grid, lane)
        chosen = _choices.find(grid, partition, lane)
        if backend is not None:
            chosen = Choice(backend, chosen.policy, chosen.timeout)
        return get(_spec(mesh, partition, lane, chosen))


def get(spec: CommunicatorSpec) -> Communicator:
    """Return the live communicator of a spec, made if missing.

    Raises:
      CommunicatorError: if the bound on live communicators is reached, the backend
        failed to make it, or is unusable since a failure.
    """
    with _lock:
        spec.backend.check_usable()
        found = _live.get(spec.key)
        if found is not None:
            return found
        bound = config.max_communicators()
        if len(_live) >= bound:
            raise CommunicatorError(
                f"there are {len(_live)} live communicators, the bound set by "
                f"JAXCOMM_MAX_COMMUNICATORS; close some (jaxcomm.communicators() lists "
                f"them) or raise the bound before making one over axes "
                f"{spec.partition.axes}"
            )
        if spec.backend.is_ours:
            extension.prepare(spec.platform, backends.ffi_platform(spec.platform))
        connection = spec.backend.make(spec, [each.spec for each in _live.values()])
        for what, count in connection.counted.items():
            _counts[what] += count
        _live[spec.key] = Communicator(spec, connection, _close)
        return _live[spec.key]


def chosen_backends() -> set[str]:
    """Return the names of the backends that init() chose."""
    with _lock:
        return _choices.backends()


def communicators() -> Communicators:
    """Return the live communicators, oldest first, as a table.

    Example:
      >>> len(jaxcomm.communicators())
      0
    """
    with _lock:
        return Communicators(_live.values())


def counts() -> dict[str, int]:
    """Return how many communicators were made, by kind, destroyed, and are live."""
    with _lock:
        return {**_counts, "live": len(_live)}


def finalize() -> None:
    """Close every communicator and forget what :func:`jaxcomm.init` chose.

    You need not call it: the process may simply end.
    """
    with _lock:
        for member in list(_live.values()):
            _close(member)
        _choices.clear()
        _specs.clear()
        for backend in backends.BACKENDS.values():
            backend.forget()


def _spec(
    mesh: jax.sharding.Mesh, partition: Partition, lane: str, choice: Choice
) -> CommunicatorSpec:
    """Return what to find or make. Chooses a backend if nothing live serves."""
    grid = replica_groups.grid_of(mesh)
    request = grid, partition, lane, choice, config.backend()
    spec = _specs.get(request)
    if spec is None or spec.key not in _live:
        backend, refusal = backends.choose(mesh, partition, lane, choice.backend)
        policy = choice.policy or CommPolicy()
        spec = _specs[request] = CommunicatorSpec(
            mesh,
            partition,
            lane,
            backend,
            policy if backend.takes_policy else None,
            choice.timeout or config.timeout_seconds(),
            refusal,
        )
    return spec


def _check_timeout(member: Communicator, seconds: float | None) -> None:
    if seconds is None or member.timeout == seconds:
        return
    raise CommunicatorError(
        f"init: timeout={seconds:g} was asked for, but {member!r} is live with "
        f"{member.timeout:g} s; close() it first, on every process"
    )


def _close(member: Communicator) -> None:
    with _lock:
        if member.closed:
            return
        del _live[member.key]
        member.closed = True
        _counts["destroyed"] += 1
        member.spec.backend.end(member.spec, member.connection)


def _leave_to_parent() -> None:
    # A child of os.fork() has none of the threads that communicators need, and shares
    # memory that is the parent's.
    global _lock
    _lock = threading.RLock()
    _live.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
