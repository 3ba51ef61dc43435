"""The live communicators of this process.

One communicator serves one partition: the devices of a mesh, divided into groups by
some of its axes. :func:`jaxcomm.init` makes it, or the lowering of a program that needs
it. Running a program never makes one.

Two locks. Whoever makes communicators holds the *turn*, also while processes wait for
each other: they meet in one order. Whoever reads or changes the tables holds *tables*,
for a moment. So what one calls to see why a start hangs never waits for the start.

What becomes of each in ``init``, ``close``, ``finalize`` and ``shrink`` is a table in
docs/failures.md, which tests/processes/test_lifetimes.py walks.
"""

import contextlib
import contextvars
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax

from jaxcomm import config
from jaxcomm.communicator import (
    backends,
    cpu_threads,
    extension,
    forks,
    rendezvous,
    replica_groups,
)
from jaxcomm.communicator.backends.backend import CommunicatorSpec, processes_of
from jaxcomm.communicator.choices import Choice, Choices
from jaxcomm.communicator.communicator import Communicator
from jaxcomm.communicator.lane import DEFAULT_LANE
from jaxcomm.communicator.policy import CommPolicy
from jaxcomm.communicator.replica_groups import Partition
from jaxcomm.communicator.table import Communicators, Counters
from jaxcomm.errors import CommunicatorError

# For each open used_here() of this thread, the keys found since.
_collecting: contextvars.ContextVar[tuple[set[int], ...]] = contextvars.ContextVar(
    "jaxcomm_used_here", default=()
)

# Held by whoever makes communicators, or closes all of them.
_turn = threading.RLock()
# What follows requires it. Under it nobody waits for another process.
_tables = threading.Condition()
_live: dict[int, Communicator] = {}
# Keys of communicators that are being closed.
_ending: set[int] = set()
_choices = Choices()
# What was asked for, and the spec that came of it.
_specs: dict[tuple, CommunicatorSpec] = {}
_counts = {"created": 0, "split": 0, "borrowed": 0, "destroyed": 0}
# What was closed to be made again, by key, and for which mesh. move() may fail before,
# and be called again after another process was lost. Requires _turn.
_to_make: dict[int, tuple[CommunicatorSpec, jax.sharding.Mesh]] = {}


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """Let one thread at a time meet other processes: all must meet in one order."""
    forks.take_part("communicators are made")
    with _turn:
        yield


def make_all(
    mesh: jax.sharding.Mesh,
    partitions: Sequence[Partition],
    lanes: Sequence[str],
    choice: Choice,
) -> Communicators:
    """Find or make a communicator for each partition and lane; remember the choice."""
    found = []
    with turn():
        for partition in partitions:
            for lane in lanes:
                member = _find_or_make(mesh, partition, lane, choice)
                _check_timeout(member, choice.timeout)
                with _tables:
                    _choices.record(partition, lane, choice)
                found.append(member)
    with _tables:
        return Communicators(found, _counters())


def for_lowering(
    mesh: jax.sharding.Mesh,
    partition: Partition,
    lane: str | None,
    backend: str | None,
) -> Communicator:
    """Return the communicator that a program being lowered needs, made if missing."""
    lane = DEFAULT_LANE if lane is None else lane
    cpu_threads.note_launcher()
    with _tables:
        _choices.check_lane(partition.grid, lane)
        chosen = _choices.find(partition, lane)
    if backend is not None:
        chosen = Choice(backend, chosen.policy, chosen.timeout)
    found = _find_or_make(mesh, partition, lane, chosen)
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
    with _tables:
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
    with _tables:
        return _choices.snapshot(grid)


def get(spec: CommunicatorSpec) -> Communicator:
    """Return the live communicator of a spec, made if missing."""
    with turn():
        return _find(spec) or _make(spec)


def _find_or_make(
    mesh: jax.sharding.Mesh, partition: Partition, lane: str, choice: Choice
) -> Communicator:
    request = partition, lane, choice, config.BACKEND
    with _tables:
        spec = _specs.get(request)
    # Who needs what is there does not wait for others that make something.
    found = None if spec is None else _find(spec)
    if found is None:
        with turn():
            spec = _choose(mesh, partition, lane, choice)
            with _tables:
                _specs[request] = spec
            found = get(spec)
    return found


def _find(spec: CommunicatorSpec) -> Communicator | None:
    if spec.backend.can_stop:
        spec.backend.check_usable()
    with _tables:
        return _live.get(spec.key)


def _make(spec: CommunicatorSpec) -> Communicator:
    """Make a communicator that is not there. Requires the turn."""
    with _tables:
        # If that takes too long, the extension refuses the key.
        _tables.wait_for(lambda: spec.key not in _ending, config.timeout_seconds())
        live = [each.spec for each in _live.values()]
    if len(live) >= config.max_communicators():
        raise CommunicatorError(
            f"there are {len(live)} live communicators, the bound set by "
            f"JAXCOMM_MAX_COMMUNICATORS; close some (jaxcomm.communicators() lists "
            f"them) or raise the bound before making one over axes "
            f"{spec.partition.axes}"
        )
    if spec.backend.is_ours:
        extension.prepare(spec.platform, backends.ffi_platform(spec.platform))
    connection = spec.backend.make(spec, live)
    with _tables:
        for what, count in connection.counted.items():
            _counts[what] += count
        made = _live[spec.key] = Communicator(spec, connection, _close)
    return made


def chosen_backend(partition: Partition, lane: str) -> str | None:
    """Return the backend that ``init`` or the environment chose, None if neither."""
    with _tables:
        return _choices.find(partition, lane).backend or config.BACKEND


def communicators() -> Communicators:
    """Return the live communicators, oldest first, as a table.

    Example:
      >>> len(jaxcomm.communicators())
      0
    """
    with _tables:
        return Communicators(_live.values(), _counters())


def _counters() -> Counters:
    """Count them. Requires ``_tables``."""
    return Counters(**_counts, live=len(_live))


def finalize() -> None:
    """Close every communicator and forget what :func:`jaxcomm.init` chose.

    You need not call it: the process may simply end. If another thread waits in
    :func:`jaxcomm.init` for other processes, it raises.
    """
    _finalize("jaxcomm.finalize was called")


def finalize_at_exit(seconds: float) -> None:
    """Finalize as this process ends, after so many seconds without the turn, too."""
    _finalize("it ends", seconds, for_good=True)


def _finalize(why: str, seconds: float = -1, for_good: bool = False) -> None:
    with rendezvous.refused(why, for_good=for_good):
        has_turn = _turn.acquire(timeout=seconds)
        try:
            for member in communicators():
                _close(member)
            with _tables:
                _choices.clear()
                _specs.clear()
            _to_make.clear()
            _forget(lambda processes: True)
        finally:
            if has_turn:
                _turn.release()


def leave() -> None:
    """Close every communicator. move() makes them again, unless finalize() comes first.

    All processes of the job that live call this.
    """
    with turn():
        _close_for_now(communicators(), lambda processes: True)


def move(old: jax.sharding.Mesh, new: jax.sharding.Mesh) -> None:
    """Go on after a failure, on a mesh that has lost processes of another, or on it.

    Every process of the new mesh calls this.

    Raises:
      CommunicatorError: a communicator cannot be made.
    """
    before, after = {*processes_of(old)}, {*processes_of(new)}
    lost = before - after

    def is_over(processes: Sequence[int]) -> bool:
        """Say whether all of some processes that live leave what they have shared."""
        return bool(lost.intersection(processes)) or before.issuperset(processes)

    with turn():
        closed = [
            member
            for member in communicators()
            if (len(member.spec.processes) > 1 and is_over(member.spec.processes))
            or member.spec.backend.can_stop
        ]
        _close_for_now(closed, is_over)
        grid, new_grid = replica_groups.grid_of(old), replica_groups.grid_of(new)
        with _tables:
            _choices.move(grid, new_grid)
        for key, (spec, mesh) in _to_make.items():
            if replica_groups.grid_of(mesh) == grid:
                _to_make[key] = spec, new

        def order(each: tuple[CommunicatorSpec, jax.sharding.Mesh]):
            # The same on all processes, whatever each of them has made before.
            spec, mesh = each
            key = 0 if replica_groups.grid_of(mesh) == new_grid else spec.key
            return spec.partition.axes, spec.lane, key, repr(spec.policy)

        # Where processes are missing, nothing is made until their mesh is shrunk.
        ready = [e for e in _to_make.values() if after.issuperset(processes_of(e[1]))]
        for spec, mesh in sorted(ready, key=order):
            grid = replica_groups.grid_of(mesh)
            if grid == spec.grid:
                get(spec)
            # Groups are of another size now: the next program that has some says which.
            elif spec.partition.index_groups is None:
                partition = replica_groups.partition(grid, spec.partition.axes)
                with _tables:
                    choice = _choices.find(partition, spec.lane)
                _find_or_make(mesh, partition, spec.lane, choice)
            del _to_make[spec.key]


def _choose(
    mesh: jax.sharding.Mesh, partition: Partition, lane: str, choice: Choice
) -> CommunicatorSpec:
    """Return what to make, of the backend that serves. Requires the turn."""
    backend, refusal = backends.choose(mesh, partition, lane, choice.backend)
    policy = choice.policy or CommPolicy()
    return CommunicatorSpec(
        mesh,
        partition,
        lane,
        backend,
        policy if backend.takes_policy else None,
        choice.timeout or config.timeout_seconds(),
        refusal,
    )


def _check_timeout(member: Communicator, seconds: float | None) -> None:
    if seconds is None or member.timeout == seconds:
        return
    raise CommunicatorError(
        f"init: timeout={seconds:g} was asked for, but {member!r} is live with "
        f"{member.timeout:g} s; close() it first, on every process"
    )


def _close_for_now(
    members: Iterable[Communicator], is_over: Callable[[Sequence[int]], bool]
) -> None:
    for member in members:
        _close(member)
        _to_make[member.key] = member.spec, member.spec.mesh
    _forget(is_over)


def _forget(is_over: Callable[[Sequence[int]], bool]) -> None:
    for backend in backends.BACKENDS.values():
        backend.forget(is_over)


def _close(member: Communicator) -> None:
    with _tables:
        if member.closed:
            return
        member.closed = True
        del _live[member.key]
        _ending.add(member.key)
        _counts["destroyed"] += 1
    try:
        # Without the lock: the programs of ranks that wait in it go on in this thread.
        member.spec.backend.end(member.spec, member.connection)
    finally:
        with _tables:
            _ending.remove(member.key)
            _tables.notify_all()


def _leave_to_parent() -> None:
    # Another thread of the parent may have held a lock. Communicators are the parent's.
    global _turn, _tables
    _turn, _tables = threading.RLock(), threading.Condition()
    _live.clear()
    _to_make.clear()


forks.in_child(_leave_to_parent)
