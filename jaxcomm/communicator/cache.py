"""The communicators of this process: make, find, list, count and close them.

One communicator serves one partition: the devices of a mesh, divided into groups
by some of its axes. It is made by :func:`init`, or when a program that needs it is
lowered, and never by running one.
"""

import atexit
import contextlib
import datetime
import itertools
import os
import threading
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from jaxcomm import config
from jaxcomm.communicator import (
    backends,
    ffi_targets,
    flight_dumps,
    neighbors,
    replica_groups,
    shutdown,
)
from jaxcomm.communicator.backends.nccl.policy import CommPolicy
from jaxcomm.communicator.communicator import DEFAULT_LANE, Communicator, check_lane
from jaxcomm.communicator.stats import Counters, MemoryRow, memory_row
from jaxcomm.communicator.table import Communicators
from jaxcomm.errors import CommunicatorError

_lock = threading.RLock()
_live: dict[int, Communicator] = {}
# The backend, policy and timeout init() chose, by (grid, axes, index groups, lane).
_chosen: dict[tuple, tuple[str, CommPolicy, float | None]] = {}
_counts = {"created": 0, "split": 0, "borrowed": 0, "destroyed": 0}


def init(
    mesh: jax.sharding.Mesh,
    axes: str | Sequence | None = None,
    *,
    lanes: str | Sequence[str] = (DEFAULT_LANE,),
    backend: str | None = None,
    policy: CommPolicy | None = None,
    timeout: float | datetime.timedelta | None = None,
) -> Communicators:
    """Makes the communicators of a mesh ahead of the first program that needs them.

    Call it with the same arguments on every process. What is live already is kept,
    so calling it again costs nothing.

    Args:
      mesh: a ``jax.sharding.Mesh``.
      axes: an axis name or a tuple of names makes one communicator over those axes
        together; a list makes one for each of its entries. If None, one for each
        axis, and one over all axes if there are several.
      lanes: names of lanes, one communicator each. The ``host`` backend matches
        operations one by one, so that independent ones overlap within a lane as well:
        there a lane is a name to count and to close by. With ``nccl`` operations of a
        lane run one after the other, those of lanes with resources of their own may
        overlap. ``xla`` ignores it.
      backend: ``"host"``, ``"nccl"``, ``"xla"``, or None: the ``JAXCOMM_BACKEND``
        variable, else ``"nccl"`` for NVIDIA GPUs where NCCL can be loaded, ``"host"``
        for CPU devices whose groups lie on one host, ``"xla"`` for the rest.
        Programs compiled later use the choice; one compiled earlier keeps the
        communicator it was compiled for.
      policy: how NCCL makes them; other backends ignore it.
      timeout: seconds (or a ``datetime.timedelta``) that a rank waits for the others in
        one of their operations before it raises. If None, the ``JAXCOMM_TIMEOUT``
        variable, else 300 s. ``xla`` has deadlines of its own. How long the making of
        a communicator may take is said by ``JAXCOMM_TIMEOUT`` alone.

    Returns:
      The communicators, a sequence that prints as a table.

    Raises:
      TypeError: if mesh is not a concrete mesh, lanes are no names, policy is no
        :class:`CommPolicy`, or timeout is no number.
      ValueError: if an axis is not one of the mesh's, the backend is unknown, or the
        timeout is not positive.
      CommunicatorError: if the backend cannot serve these devices or failed to, the
        bound on live communicators is reached, or one that is live has another timeout
        than the one asked for.

    Example:
      >>> mesh = jax.make_mesh((2, 4), ("data", "context"))  # doctest: +SKIP
      >>> jaxcomm.init(mesh, ["data", ("data", "context")])  # doctest: +SKIP
      mesh axes       lane     backend  size  groups  calls  bytes  memory  state
      --------------  -------  -------  ----  ------  -----  -----  ------  -----
      data            default  host     2     4       0      0 B    2.1 kB  live
      data x context  default  host     8     1       0      0 B    784 B   live
    """
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(
            f"init: mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}. An "
            f"abstract mesh has no devices to make communicators for."
        )
    lanes = _lane_names(lanes)
    if policy is None:
        policy = CommPolicy()
    elif not isinstance(policy, CommPolicy):
        raise TypeError(
            f"init: policy must be a jaxcomm.CommPolicy or None, got {policy!r}. Pass "
            f"its fields by name, as in jaxcomm.CommPolicy(max_ctas=8)."
        )
    seconds = _seconds(timeout)
    if axes is None:
        wanted = [(name,) for name in mesh.axis_names]
        if len(wanted) > 1:
            wanted.append(tuple(mesh.axis_names))
    elif isinstance(axes, list):
        wanted = [replica_groups.canonical_axes(entry) for entry in axes]
    else:
        wanted = [replica_groups.canonical_axes(axes)]
    grid = replica_groups.grid_of(mesh)
    parts = [replica_groups.partition(grid, entry) for entry in wanted]
    with _lock:
        made = []
        for part in parts:
            for lane in lanes:
                choice = backends.choose(mesh, part, lane, backend)
                place = grid, part.axes, part.index_groups, lane
                member = _described(grid, part, lane, mesh, choice, policy, seconds)
                _check_timeout(_live.get(member.key), seconds)
                made.append(_find_or_create(member, mesh, part, choice))
                _chosen[place] = choice.backend.name, policy, seconds
        return Communicators(made)


def for_lowering(
    mesh: jax.sharding.Mesh,
    axes: tuple[str, ...],
    index_groups: replica_groups.IndexGroups,
    lane: str | None,
    backend: str | None,
) -> Communicator:
    """Returns the communicator a program being lowered needs, made if missing."""
    grid = replica_groups.grid_of(mesh)
    lane = DEFAULT_LANE if lane is None else lane
    part = replica_groups.partition(grid, axes, index_groups)
    with _lock:
        chosen_backend, policy, seconds = _choice(grid, part, lane)
        check_lane(lane, "lane")
        backend = chosen_backend if backend is None else backend
        choice = backends.choose(mesh, part, lane, backend)
        member = _described(grid, part, lane, mesh, choice, policy, seconds)
        return _find_or_create(member, mesh, part, choice)


def _choice(grid, part, lane) -> tuple[str | None, CommPolicy, float | None]:
    """Returns what init() chose for a partition, or for the same axes undivided.

    Permutes count ranks in the mesh's order of axes, whatever init() was given.
    """
    for index_groups in dict.fromkeys((part.index_groups, None)):
        # The first is the order as it is.
        for axes in itertools.permutations(part.axes):
            chosen = _chosen.get((grid, axes, index_groups, lane))
            if chosen is not None:
                return chosen
    return None, CommPolicy(), None


def chosen_backends() -> set[str]:
    """Return the names of the backends that init() chose."""
    with _lock:
        return {backend for backend, _, _ in _chosen.values()}


def communicators() -> Communicators:
    """Returns the live communicators, oldest first, as a table.

    Example:
      >>> len(communicators())  # doctest: +SKIP
      2
    """
    with _lock:
        return Communicators(_live.values())


def counters() -> Counters:
    """Returns how many communicators this process made and ended.

    Returns:
      A :class:`Counters`, which compares with ``==``.

    Example:
      >>> before = jaxcomm.counters()
      >>> jax.block_until_ready(step(x))  # doctest: +SKIP
      >>> assert jaxcomm.counters() == before  # doctest: +SKIP
    """
    with _lock:
        return Counters(live=len(_live), **_counts)


def memory_report() -> list[MemoryRow]:
    """Returns the memory each live communicator holds, oldest first.

    The ``host`` backend moves bytes straight from operand to result within a process
    and holds a few hundred bytes a rank. All communicators between the same processes
    share one piece of shared memory, which is told on the row of each of them. What
    XLA holds for the ``xla`` backend it does not tell: those rows say 0.

    Returns:
      A list of :class:`MemoryRow`, in bytes.

    Example:
      >>> sum(row.host_bytes for row in jaxcomm.memory_report())  # doctest: +SKIP
      3696
    """
    live = communicators()
    return [memory_row(member, live) for member in live]


def finalize() -> None:
    """Closes every communicator and forgets the backends :func:`init` chose.

    Nobody must call it: the process may simply end.
    """
    with _lock:
        for member in list(_live.values()):
            _drop(member)
        _chosen.clear()
        neighbors.forget()
        for backend in backends.BACKENDS.values():
            backend.forget()


@atexit.register
def _end():
    try:
        with contextlib.suppress(Exception):  # nobody is left to handle it
            shutdown.wait_for_work(communicators())
    finally:
        # Ranks still waiting get an error instead of holding the process up.
        finalize()


def _leave_to_parent():
    # A child of os.fork() has none of the threads that communicators need, and what
    # they share with other processes is the parent's.
    global _lock
    _lock = threading.RLock()
    atexit.unregister(_end)
    _live.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def _lane_names(lanes) -> tuple[str, ...]:
    names = (lanes,) if isinstance(lanes, str) else lanes
    if not isinstance(names, Iterable):
        raise TypeError(
            f"init: lanes must be names, got {lanes!r}. Pass one for each lane, as in "
            f"lanes=('keys', 'values'); how many there may be is CommPolicy(lanes=...)."
        )
    names = tuple(names)
    for name in names:
        check_lane(name, "lane")
    return names


def _seconds(timeout) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, datetime.timedelta):
        timeout = timeout.total_seconds()
    numbers = int | float | np.integer | np.floating
    if isinstance(timeout, bool) or not isinstance(timeout, numbers):
        raise TypeError(
            f"init: timeout must be a number of seconds, a datetime.timedelta or None, "
            f"got {timeout!r}"
        )
    # Also refuses NaN, which compares false, and infinity: every wait ends.
    if not 0 < timeout < 1e9:
        raise ValueError(
            f"init: timeout must be a positive number of seconds, got {timeout!r}; "
            f"pass many, such as 86400, for a wait that nearly never ends"
        )
    return float(timeout)


def _check_timeout(live, seconds):
    if live is None or seconds is None or live.timeout == seconds:
        return
    raise CommunicatorError(
        f"init: timeout={seconds:g} was asked for, but {live!r} is live with "
        f"{live.timeout:g} s; close() it first, on every process"
    )


def _described(grid, part, lane, mesh, choice, policy, seconds):
    platform = mesh.devices.flat[0].platform
    seconds = seconds or config.timeout_seconds()
    return Communicator(grid, part, lane, platform, choice, policy, seconds, _close)


def _find_or_create(made, mesh, part, choice):
    if made.key in _live:
        return _live[made.key]
    bound = config.max_communicators()
    if len(_live) >= bound:
        raise CommunicatorError(
            f"there are {len(_live)} live communicators, the bound set by "
            f"JAXCOMM_MAX_COMMUNICATORS; close some (jaxcomm.communicators() lists "
            f"them) or raise the bound before making one over axes {part.axes}"
        )
    if made.is_ours:
        ffi_targets.register(made.platform)
        flight_dumps.prepare(made.platform)
    counted = choice.backend.make(made, mesh, part, choice, communicators())
    for what, count in counted.items():
        _counts[what] += count
    _live[made.key] = made
    made.closed = False
    return made


def _close(member):
    with _lock:
        if not member.closed:
            _drop(member)


def _drop(member):
    del _live[member.key]
    member.closed = True
    _counts["destroyed"] += 1
    backends.BACKENDS[member.backend].end(member)
