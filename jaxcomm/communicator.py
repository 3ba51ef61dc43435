"""The communicators of this process: make, find, list, count and close them.

One communicator serves one partition: the devices of a mesh, divided into groups
by some of its axes. It is made by :func:`init`, or when a program that needs it is
lowered, and never by running one.
"""

import atexit
import contextlib
import threading
from collections.abc import Iterable, Sequence

import jax

from jaxcomm import (
    _ffi,
    _targets,
    backends,
    bootstrap,
    config,
    ending,
    mesh_groups,
)
from jaxcomm.accounts import Counters, MemoryRow
from jaxcomm.communicator_table import Communicators
from jaxcomm.diagnostics import dumps
from jaxcomm.errors import CommunicatorError
from jaxcomm.nccl import communicators as nccl
from jaxcomm.nccl import registration
from jaxcomm.nccl.policy import CommPolicy

DEFAULT_LANE = "default"


class Communicator:
    """One partition of a mesh's devices, ready to communicate.

    Attributes:
      axes: the mesh axes it joins.
      index_groups: the ``axis_index_groups`` it is divided by, or None.
      lane: its lane; operations of one lane are ordered, those of different lanes
        may overlap.
      backend: ``"host"`` (our own transport), ``"nccl"`` or ``"xla"`` (XLA's
        collectives).
      transport: how its bytes travel: ``"memory"``, ``"shared memory"``, ``"NCCL "``
        and its version, ``"xla"``, or ``"xla: "`` and why it is not one of the others.
      policy: how NCCL was asked to make it; None for other backends.
      groups: global device ids of each group, in rank order.
      key: the content hash by which compiled programs name it.
    """

    def __init__(self, grid, part, lane, platform, choice, policy):
        """Describes the communicator; :func:`init` also makes it live."""
        self.grid = grid
        self.axes = part.axes
        self.index_groups = part.index_groups
        self.lane = lane
        self.backend = choice.backend
        self.platform = platform
        self.transport = choice.transport
        self.neighbors = choice.neighbors
        self.groups = part.groups
        self.policy = policy if choice.backend == "nccl" else None
        self.key = mesh_groups.key(
            grid, part, lane, choice.backend, repr(self.policy) if self.policy else ""
        )
        # What it was split off, which lives as long as this.
        self.world: _ffi.NcclWorld | None = None

    @property
    def size(self) -> int:
        """The number of devices of its largest group."""
        return max(len(group) for group in self.groups)

    @property
    def borrows(self) -> bool:
        """Whether XLA lends NCCL's communicator: ``CommPolicy(source="xla")``."""
        is_one = self.policy is not None and self.policy.source == "xla"
        return is_one and self.size > 1

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` or :func:`finalize` ended it."""
        return _live.get(self.key) is not self

    def stats(self) -> dict:
        """Returns what it did so far.

        Returns:
          ``calls``: completed collectives by name, as one group counts them;
          ``bytes``: handed in by the ranks of this process; ``host_bytes``: held by
          the communicator itself, ``device_bytes`` likewise on devices;
          ``in_flight``: collectives some rank waits in; ``symmetric_calls``: of the
          ``nccl`` backend, those whose arrays all lay in a :class:`SymmetricPool`;
          ``is_suspended``.
          All zero for the ``xla`` backend, whose collectives run inside XLA.
        """
        found = {} if self.closed or self.backend == "xla" else _ffi.stats(self.key)
        return {
            "calls": {}, "bytes": 0, "host_bytes": 0, "device_bytes": 0, "in_flight": 0,
            "symmetric_calls": 0, "is_suspended": False, **found,
        }  # fmt: skip

    def close(self) -> None:
        """Ends it; whoever waits in it gets an error. Closing twice is harmless.

        Programs compiled for it raise until :func:`init` makes it anew.
        """
        with _lock:
            if not self.closed:
                _drop(self)

    @property
    def suspended(self) -> bool:
        """Whether :meth:`suspend` gave its device memory back."""
        return bool(self.stats()["is_suspended"])

    def suspend(self) -> None:
        """Gives its device memory back until :meth:`resume`; every process calls it.

        It waits for the operations on their way. Those that come in between fail.
        Suspending twice is harmless.

        Raises:
          CommunicatorError: if it is closed, not of the ``nccl`` backend, or NCCL is
            older than 2.29.7 or refuses.
        """
        self._suspend(True)

    def resume(self) -> None:
        """Takes the memory that :meth:`suspend` gave back; every process calls it.

        Raises:
          CommunicatorError: as :meth:`suspend` does.
        """
        self._suspend(False)

    def _suspend(self, suspend):
        what = "suspend" if suspend else "resume"
        if self.closed or self.world is None:
            state = "closed" if self.closed else f"of the {self.backend!r} backend"
            if not self.closed and self.backend == "nccl":
                state = "XLA's own, or of groups of one"
            raise CommunicatorError(
                f"{what}: the communicator over axes {self.axes} (lane {self.lane!r}) "
                f"is {state}; live ones of the 'nccl' backend can be suspended"
            )
        try:
            _ffi.suspend(self.key, suspend)
        except RuntimeError as error:
            raise CommunicatorError(f"{what}: {error}") from None

    def __enter__(self) -> "Communicator":
        """Returns itself; the end of the ``with`` block closes it."""
        return self

    def __exit__(self, *exc_info) -> None:
        """Closes it."""
        self.close()

    def __repr__(self) -> str:
        """Says in one line what it joins."""
        state = "closed" if self.closed else "live"
        return (
            f"<Communicator axes={self.axes} lane={self.lane!r} backend={self.backend} "
            f"groups={len(self.groups)} x {self.size} {state}>"
        )


_lock = threading.RLock()
_live: dict[int, Communicator] = {}
# The backend and policy init() chose, by (grid, axes, index groups, lane).
_chosen: dict[tuple, tuple[str, CommPolicy]] = {}
# Communicators of each key that there were: one made anew never meets its predecessor.
_generations: dict[int, int] = {}
_counts = {"created": 0, "split": 0, "borrowed": 0, "destroyed": 0}


def init(
    mesh: jax.sharding.Mesh,
    axes: str | Sequence | None = None,
    *,
    lanes: str | Sequence[str] = (DEFAULT_LANE,),
    backend: str | None = None,
    policy: CommPolicy | None = None,
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

    Returns:
      The communicators, a sequence that prints as a table.

    Raises:
      TypeError: if mesh is not a concrete mesh, lanes are no names, or policy is no
        :class:`CommPolicy`.
      ValueError: if an axis is not one of the mesh's or the backend is unknown.
      CommunicatorError: if the backend cannot serve these devices or failed to, or the
        bound on live communicators is reached.

    Example:
      >>> mesh = jax.make_mesh((2, 4), ("data", "context"))  # doctest: +SKIP
      >>> jaxcomm.init(mesh, ["data", ("data", "context")])  # doctest: +SKIP
      mesh axes       lane     backend  size  groups  calls  bytes  memory  state
      --------------  -------  -------  ----  ------  -----  -----  ------  -----
      data            default  host     2     4       0      0 B    1.1 kB  live
      data x context  default  host     8     1       0      0 B    392 B   live
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
    if axes is None:
        wanted = [(name,) for name in mesh.axis_names]
        if len(wanted) > 1:
            wanted.append(tuple(mesh.axis_names))
    elif isinstance(axes, list):
        wanted = [mesh_groups.canonical_axes(entry) for entry in axes]
    else:
        wanted = [mesh_groups.canonical_axes(axes)]
    grid = mesh_groups.grid_of(mesh)
    parts = [mesh_groups.partition(grid, entry) for entry in wanted]
    with _lock:
        made = []
        for part in parts:
            for lane in lanes:
                choice = backends.choose(mesh, part, lane, backend)
                chosen = choice.backend, policy
                _chosen[grid, part.axes, part.index_groups, lane] = chosen
                made.append(_find_or_create(mesh, grid, part, lane, choice, policy))
        return Communicators(made)


def for_lowering(
    mesh: jax.sharding.Mesh,
    axes: tuple[str, ...],
    index_groups: mesh_groups.IndexGroups,
    lane: str | None,
    backend: str | None,
) -> Communicator:
    """Returns the communicator a program being lowered needs, made if missing."""
    grid = mesh_groups.grid_of(mesh)
    lane = DEFAULT_LANE if lane is None else lane
    part = mesh_groups.partition(grid, axes, index_groups)
    with _lock:
        chosen = _chosen.get((grid, part.axes, part.index_groups, lane))
        if chosen is None and index_groups is not None:
            chosen = _chosen.get((grid, part.axes, None, lane))
        chosen_backend, policy = chosen or (None, CommPolicy())
        _check_lane(lane)
        choice = backends.choose(mesh, part, lane, backend or chosen_backend)
        return _find_or_create(mesh, grid, part, lane, choice, policy)


def communicators() -> Communicators:
    """Returns the live communicators, oldest first, as a table.

    Example:
      >>> len(communicators())  # doctest: +SKIP
      2
    """
    with _lock:
        return Communicators(_live.values())


def counters() -> Counters:
    """Returns how many communicators this process made and ended."""
    with _lock:
        return Counters(live=len(_live), **_counts)


def memory_report() -> list[MemoryRow]:
    """Returns the memory each live communicator holds, oldest first.

    The ``host`` backend moves bytes straight from operand to result within a process
    and holds a few hundred bytes a rank. All communicators between the same processes
    share one piece of shared memory, which is told on the row of each of them. What
    XLA holds for the ``xla`` backend it does not tell: those rows say 0.
    """
    members = communicators()
    arenas = [id(m.neighbors) for m in members if m.neighbors is not None]
    return [
        MemoryRow(
            communicator=member,
            device_bytes=member.stats()["device_bytes"],
            parent_bytes=member.world.device_bytes if member.world else 0,
            host_bytes=member.stats()["host_bytes"],
            shared_bytes=_shared_bytes(member),
            pinned_bytes=0,
            symmetric_bytes=registration.bytes_with(member),
            shared=arenas.count(id(member.neighbors)) > 1 or _shares(member),
        )
        for member in members
    ]


def _shares(member):
    is_default = member.lane == DEFAULT_LANE
    if member.policy is None or member.borrows:
        return member.borrows
    return member.policy.shares(is_default)


def _shared_bytes(member):
    if member.neighbors is None or member.neighbors.segment is None:
        return 0
    return member.neighbors.segment.resident_bytes()


def finalize() -> None:
    """Closes every communicator and forgets the backends :func:`init` chose.

    Nobody must call it: the process may simply end.
    """
    with _lock:
        for member in list(_live.values()):
            _drop(member)
        _chosen.clear()
        bootstrap.forget()
        nccl.forget()


@atexit.register
def _end():
    try:
        with contextlib.suppress(Exception):  # nobody is left to handle it
            ending.wait_for_work(communicators())
    finally:
        # Ranks still waiting get an error instead of holding the process up.
        finalize()


def _lane_names(lanes) -> tuple[str, ...]:
    names = (lanes,) if isinstance(lanes, str) else lanes
    if not isinstance(names, Iterable):
        raise TypeError(
            f"init: lanes must be names, got {lanes!r}. Pass one for each lane, as in "
            f"lanes=('keys', 'values'); how many there may be is CommPolicy(lanes=...)."
        )
    names = tuple(names)
    for name in names:
        _check_lane(name)
    return names


def _check_lane(lane):
    if not isinstance(lane, str) or not lane:
        raise ValueError(f"lane must be a non-empty string, got {lane!r}")


def _find_or_create(mesh, grid, part, lane, choice, policy):
    platform = mesh.devices.flat[0].platform
    made = Communicator(grid, part, lane, platform, choice, policy)
    if made.key in _live:
        return _live[made.key]
    bound = config.max_communicators()
    if len(_live) >= bound:
        raise CommunicatorError(
            f"there are {len(_live)} live communicators, the bound set by "
            f"JAXCOMM_MAX_COMMUNICATORS; close some (jaxcomm.communicators() lists "
            f"them) or raise the bound before making one over axes {part.axes}"
        )
    if made.borrows:
        _targets.register(platform)
        dumps.prepare(platform)
        nccl.borrow(mesh, part, made.key, lane, platform)
        _counts["borrowed"] += 1
    elif made.backend == "nccl" and made.size > 1:
        _check_lanes(made)
        _targets.register(platform)
        dumps.prepare(platform)
        worlds = {id(member.world) for member in _live.values()}
        made.world = nccl.create(
            mesh, part, made.key, lane, platform, policy, _shares(made)
        )
        _counts["created"] += id(made.world) not in worlds
        _counts["split"] += 1
    elif made.backend == "host":
        _targets.register(platform)
        dumps.prepare(platform)
        shared = {}
        if choice.neighbors is not None:
            generation = _generations.get(made.key, 0)
            _generations[made.key] = generation + 1
            shared = {
                "process_set": choice.neighbors.process_set,
                "processes": [list(ranks) for ranks in choice.processes],
                "generation": generation,
            }
        _ffi.create_host(
            key=made.key,
            axes=str(part.axes),
            lane=lane,
            platform=platform,
            timeout_seconds=config.timeout_seconds(),
            groups=[list(group) for group in part.groups],
            **shared,
        )
        _counts["created"] += 1
    elif made.backend == "xla":
        _counts["borrowed"] += 1
    _live[made.key] = made
    if registration.is_wanted(made):
        try:
            for pool in registration.pools(mesh):
                pool.register_with(made)
        except BaseException:
            _drop(made)
            raise
    return made


def _check_lanes(made):
    lanes = {
        member.lane
        for member in _live.values()
        if (member.grid, member.axes, member.index_groups, member.backend)
        == (made.grid, made.axes, made.index_groups, made.backend)
    }
    if len(lanes) >= made.policy.lanes:
        raise CommunicatorError(
            f"axes {made.axes} have lanes {sorted(lanes)} already, as many as "
            f"CommPolicy(lanes={made.policy.lanes}) allows; close one, or raise the "
            f"bound before making lane {made.lane!r}"
        )


def _drop(member):
    del _live[member.key]
    _counts["destroyed"] += 1
    if member.backend == "host" or member.world is not None or member.borrows:
        _ffi.destroy(member.key)
    member.world = None
