"""The live communicators of this process.

One communicator serves one partition: the devices of a mesh, divided into groups by
some of its axes. :func:`jaxcomm.init` makes it, or the lowering of a program that needs
it. Running a program never makes one.
"""

import contextlib
import contextvars
import dataclasses
import os
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax

from jaxcomm import config
from jaxcomm.communicator import backends, extension, replica_groups
from jaxcomm.communicator.backends.backend import CommunicatorSpec, processes_of
from jaxcomm.communicator.communicator import Communicator
from jaxcomm.communicator.lane import DEFAULT_LANE
from jaxcomm.communicator.policy import CommPolicy
from jaxcomm.communicator.replica_groups import DeviceGrid, Partition
from jaxcomm.communicator.table import Communicators
from jaxcomm.errors import CommunicatorError


@dataclasses.dataclass(frozen=True)
class Choice:
    """What somebody chose about a communicator; None where nobody did.

    Attributes:
      backend: name of its backend.
      policy: how NCCL makes it.
      timeout: seconds a rank waits for the others.
    """

    backend: str | None = None
    policy: CommPolicy | None = None
    timeout: float | None = None


class Choices:
    """Choices by mesh, axes and lane; and the lanes declared, by mesh."""

    def __init__(self):
        self._chosen: dict[tuple, Choice] = {}
        self._lanes: dict[DeviceGrid, set[str]] = {}

    def record(self, partition: Partition, lane: str, choice: Choice) -> None:
        """Remember a choice for a partition."""
        grid = partition.grid
        for axes in (partition.axes, frozenset(partition.axes)):
            self._chosen[grid, axes, partition.index_groups, lane] = choice
        self._lanes.setdefault(grid, {DEFAULT_LANE}).add(lane)

    def check_lane(self, grid: DeviceGrid, lane: str) -> None:
        """Raise CommunicatorError if ``init`` declared lanes of a mesh, but not this.

        Without ``init`` there is no list to compare with, and every lane is good: a
        first program needs no setup.
        """
        declared = self._lanes.get(grid)
        if declared is None or lane in declared:
            return
        names = ", ".join(map(repr, sorted(declared)))
        raise CommunicatorError(
            f"lane {lane!r} is not declared for this mesh of axes {grid.axis_names}: "
            f"its lanes are {names}. Use one of them, or declare it on every process: "
            f"jaxcomm.init(mesh, lanes=({lane!r},))"
        )

    def find(self, partition: Partition, lane: str) -> Choice:
        """Return the choice for a partition.

        A choice for axes holds for index groups within them, and for the same axes in
        another order: permutes count ranks in the mesh's order of axes, whatever order
        ``init`` was given.
        """
        for index_groups in (partition.index_groups, None):
            for axes in (partition.axes, frozenset(partition.axes)):
                found = self._chosen.get((partition.grid, axes, index_groups, lane))
                if found is not None:
                    return found
        return Choice()

    def move(self, old: DeviceGrid, new: DeviceGrid) -> None:
        """Choose for a grid what was chosen for another of the same axes."""
        for (grid, axes, index_groups, lane), choice in list(self._chosen.items()):
            # Groups are of another size now: the next program that has some says which.
            if grid == old and index_groups is None:
                self._chosen[new, axes, None, lane] = choice
        if old in self._lanes:
            self._lanes[new] = self._lanes[old]

    def snapshot(self, grid: DeviceGrid | None) -> frozenset:
        """Return the choices for a grid, or for all, as a value to compare."""
        return frozenset(
            (where, choice)
            for where, choice in self._chosen.items()
            if grid is None or where[0] == grid
        )

    def clear(self) -> None:
        """Forget all choices."""
        self._chosen.clear()
        self._lanes.clear()


@dataclasses.dataclass(eq=False)
class _ToMake:
    """A communicator that was closed, and the grid for which it is to be made."""

    spec: CommunicatorSpec
    grid: DeviceGrid


# For each open used_here() of this thread, the keys found since.
_collecting: contextvars.ContextVar[tuple[set[int], ...]] = contextvars.ContextVar(
    "jaxcomm_used_here", default=()
)

# All below require it.
_lock = threading.RLock()
_live: dict[int, Communicator] = {}
_choices = Choices()
# What was asked for, and the spec that came of it.
_specs: dict[tuple, CommunicatorSpec] = {}
# What move() has closed, until it has made it again. It may fail before, and be called
# again after another process was lost.
_to_make: list["_ToMake"] = []
_counts = {"created": 0, "split": 0, "borrowed": 0, "destroyed": 0}
# Whether this is a child of os.fork() in a process that had communicators.
_is_forked = False


def make_all(
    mesh: jax.sharding.Mesh,
    partitions: Sequence[Partition],
    lanes: Sequence[str],
    choice: Choice,
) -> Communicators:
    """Find or make a communicator for each partition and lane; remember the choice."""
    found = []
    with _lock:
        for partition in partitions:
            for lane in lanes:
                member = get(_spec(mesh, partition, lane, choice))
                _check_timeout(member, choice.timeout)
                _choices.record(partition, lane, choice)
                found.append(member)
    return Communicators(found)


def for_lowering(
    mesh: jax.sharding.Mesh,
    partition: Partition,
    lane: str | None,
    backend: str | None,
) -> Communicator:
    """Return the communicator that a program being lowered needs, made if missing."""
    lane = DEFAULT_LANE if lane is None else lane
    with _lock:
        _choices.check_lane(partition.grid, lane)
        chosen = _choices.find(partition, lane)
        if backend is not None:
            chosen = Choice(backend, chosen.policy, chosen.timeout)
        found = get(_spec(mesh, partition, lane, chosen))
    for keys in _collecting.get():
        keys.add(found.key)
    return found


@contextlib.contextmanager
def used_here() -> Iterator[set[int]]:
    """Collect the keys of the communicators that this thread's lowerings ask for.

    A program that JAX has compiled before is not lowered again, and adds no keys.

    Yields:
      The keys found so far; complete once the block ends. Keys found in an inner block
      also count for the outer one.

    Example:
      >>> program = jax.shard_map(
      ...     lambda x: jaxcomm.psum(x, "context"),
      ...     in_specs=jax.P("context"),
      ...     out_specs=jax.P(),
      ... )
      >>> with used_here() as keys:
      ...     compiled = jax.jit(program).lower(jnp.arange(4.0)).compile()
      >>> are_live(keys)
      True
    """
    found: set[int] = set()
    token = _collecting.set((*_collecting.get(), found))
    try:
        yield found
    finally:
        _collecting.reset(token)


def are_live(keys: Iterable[int]) -> bool:
    """Say whether the communicators of all these keys are live.

    Programs that were compiled for one that is not raise when they run.
    """
    with _lock:
        return _live.keys() >= set(keys)


def choices_of(mesh: Any) -> Hashable:
    """Return what :func:`jaxcomm.init` chose for a mesh, as a value to compare.

    Two results are equal if the choices are. A program lowered under one choice is
    still right while this returns an equal value and its communicators are live.

    Args:
      mesh: a ``jax.sharding.Mesh``. An abstract mesh, or None, may come to be any mesh:
        the result then holds the choices for all meshes.
    """
    is_concrete = isinstance(mesh, jax.sharding.Mesh)
    grid = replica_groups.grid_of(mesh) if is_concrete else None
    with _lock:
        return _choices.snapshot(grid)


def get(spec: CommunicatorSpec) -> Communicator:
    """Return the live communicator of a spec, made if missing."""
    with _lock:
        if _is_forked:
            raise CommunicatorError(
                f"a communicator over axes {spec.partition.axes} was asked for in "
                f"process {os.getpid()}, which was forked from process "
                f"{os.getppid()}. That had communicators, and its child cannot use "
                f'JAX. Start processes by multiprocessing.get_context("spawn"), or by '
                f'"forkserver"'
            )
        if spec.backend.can_stop:
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


def chosen_backend(partition: Partition, lane: str) -> str | None:
    """Return the backend that ``init`` or the environment chose, None if neither."""
    with _lock:
        return _choices.find(partition, lane).backend or config.BACKEND


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
        _to_make.clear()
        for backend in backends.BACKENDS.values():
            backend.forget()


def move(old: jax.sharding.Mesh, new: jax.sharding.Mesh) -> None:
    """Go on after a failure, on a mesh that has lost processes of another, or on it.

    Every process of the new mesh calls this. What spans processes of the old mesh is
    closed, and what fails together. What has lost nobody is made again under its key,
    and what was the old mesh's for the new one.

    Raises:
      CommunicatorError: a communicator cannot be made.
    """
    before = {*processes_of(old)}
    lost = before - {*processes_of(new)}
    grid, new_grid = replica_groups.grid_of(old), replica_groups.grid_of(new)
    with _lock:
        closed = [
            member
            for member in _live.values()
            if lost.intersection(member.spec.processes)
            or (len(member.spec.processes) > 1 and before >= {*member.spec.processes})
            or member.spec.backend.can_stop
        ]
        for member in closed:
            _close(member)
        # None remembers anything of what is still live: that is of this process alone.
        for backend in backends.BACKENDS.values():
            backend.forget()
        _choices.move(grid, new_grid)
        _to_make.extend(_ToMake(member.spec, member.spec.grid) for member in closed)

        of_mesh = [each for each in _to_make if each.grid == grid]
        for each in of_mesh:
            each.grid = new_grid
        _to_make[:] = [
            each
            for each in _to_make
            if each in of_mesh or not lost.intersection(each.spec.processes)
        ]

        def order(each):
            # The same on all processes, whatever each of them has made before.
            spec = each.spec
            key = 0 if each in of_mesh else spec.key
            return spec.partition.axes, spec.lane, key, repr(spec.policy)

        for each in sorted(_to_make, key=order):
            spec = each.spec
            if each.grid == spec.grid:
                get(spec)
            elif each.grid == new_grid and spec.partition.index_groups is None:
                partition = replica_groups.partition(new_grid, spec.partition.axes)
                choice = _choices.find(partition, spec.lane)
                get(_spec(new, partition, spec.lane, choice))
            _to_make.remove(each)


def _spec(
    mesh: jax.sharding.Mesh, partition: Partition, lane: str, choice: Choice
) -> CommunicatorSpec:
    """Return what to find or make. Chooses a backend if nothing live serves."""
    request = partition, lane, choice, config.BACKEND
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
    global _lock, _is_forked
    _lock = threading.RLock()
    _is_forked = _is_forked or any(_counts.values())
    _live.clear()
    _to_make.clear()


with contextlib.suppress(AttributeError):  # no fork on this system
    os.register_at_fork(after_in_child=_leave_to_parent)
