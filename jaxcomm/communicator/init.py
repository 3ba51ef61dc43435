""":func:`jaxcomm.init`: makes the communicators of a mesh ahead of its programs."""

import datetime
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from jaxcomm import config
from jaxcomm.communicator import backends, cache, replica_groups
from jaxcomm.communicator.choices import Choice
from jaxcomm.communicator.lane import DEFAULT_LANE, check_lane
from jaxcomm.communicator.policy import CommPolicy
from jaxcomm.communicator.table import Communicators


def init(
    mesh: jax.sharding.Mesh,
    *axes: str | tuple[str, ...],
    lanes: str | Sequence[str] = (DEFAULT_LANE,),
    backend: str | None = None,
    policy: CommPolicy | None = None,
    timeout: float | datetime.timedelta | None = None,
) -> Communicators:
    """Make the communicators of a mesh ahead of the first program that needs them.

    Call it with the same arguments on every process of the mesh. It keeps communicators
    that are live already, so calling it again costs nothing. A process that has no
    device in the mesh may call it too, and waits for nobody.

    Args:
      mesh: a ``jax.sharding.Mesh``.
      *axes: what each communicator joins: an axis, or a tuple of axes together. If
        there are none, one for each axis, and one over all axes if there are several.
      lanes: names of lanes, in order, one communicator each. ``host``: a lane is only a
        label; operations overlap anyway. ``nccl``: operations of one lane run in order,
        and lanes with resources of their own may overlap. ``xla`` ignores it. Once a
        mesh has lanes, a call in a lane that it does not have raises. It always has
        ``"default"``, and calling this again adds lanes.
      backend: ``"host"``, ``"nccl"``, ``"xla"``, or None: the ``JAXCOMM_BACKEND``
        variable, else ``"nccl"`` for NVIDIA GPUs where NCCL can be loaded, ``"host"``
        for CPU devices whose groups lie on one host, ``"xla"`` for the rest, and for
        all where jaxcomm was installed without its extension.
        Programs compiled later use the choice; one compiled earlier keeps the
        communicator it was compiled for. ``JAXCOMM_BACKEND=xla`` holds for all meshes:
        with it, only ``"xla"`` or None may be given here.
      policy: how NCCL makes them. A backend that the platform chooses may take no
        policy, and leaves it aside; ``backend=`` must name one that does.
      timeout: seconds (or a ``datetime.timedelta``) that a rank waits for the others in
        one operation before it raises. If None, the ``JAXCOMM_TIMEOUT`` variable, else
        300 s. ``xla`` has timeouts of its own. ``JAXCOMM_TIMEOUT`` alone bounds the
        making of a communicator.

    Returns:
      The communicators, a sequence that prints as a table.

    Raises:
      TypeError: if mesh is not a concrete mesh, axes are a list, lanes are no names
        or a set, policy is no :class:`CommPolicy`, or timeout is no number.
      ValueError: if an axis is not one of the mesh's, axes or lanes are an empty tuple,
        the backend is unknown, takes no policy or is forbidden by
        ``JAXCOMM_BACKEND=xla``, or the timeout is not positive.
      CommunicatorError: if the backend cannot serve these devices or failed to, the
        bound on live communicators is reached, or one that is live has another timeout
        than the one asked for.

    Example:
      >>> mesh = jax.make_mesh((2, 4), ("data", "context"))
      >>> made = jaxcomm.init(mesh, "data", ("data", "context"))
      >>> [(each.axes, each.backend, each.size) for each in made]
      [(('data',), 'host', 2), (('data', 'context'), 'host', 8)]
    """
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(
            f"init: mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}. An "
            f"abstract mesh has no devices to make communicators for."
        )
    names = _lane_names(lanes)
    if not isinstance(policy, CommPolicy | None):
        raise TypeError(
            f"init: policy must be a jaxcomm.CommPolicy or None, got {policy!r}. Pass "
            f"its fields by name, as in jaxcomm.CommPolicy(max_ctas=8)."
        )
    _check_backend(backend)
    backends.check_policy(backend, policy)
    choice = Choice(backend, policy, seconds_of(timeout, "init"))
    grid = replica_groups.grid_of(mesh)
    partitions = [
        replica_groups.partition(grid, each) for each in _wanted_axes(mesh, axes)
    ]
    return cache.make_all(mesh, partitions, names, choice)


def _wanted_axes(mesh: jax.sharding.Mesh, axes) -> list[tuple[str, ...]]:
    for each in axes:
        if isinstance(each, list):
            raise TypeError(
                f"init: the list {each} may mean one communicator for each entry, or "
                f"one over all of them together, as in psum. Write init(mesh, "
                f"{', '.join(map(repr, each))}) for one each, or init(mesh, "
                f"tuple(axes)) for one over all"
            )
    if () in axes:
        raise ValueError(
            f"init: an empty tuple joins no axes, got init(mesh, "
            f"{', '.join(map(repr, axes))}). Leave it out, or name an axis"
        )
    if axes:
        return [replica_groups.canonical_axes(each) for each in axes]
    single = [(name,) for name in mesh.axis_names]
    return [*single, tuple(mesh.axis_names)] if len(single) > 1 else single


def _check_backend(backend: str | None) -> None:
    """Raise ValueError if calls that name no backend would not use this one."""
    if backend is None or backend == "xla" or config.BACKEND != "xla":
        return
    name = backends.named(backend).name
    raise ValueError(
        f"init: backend {name!r} was asked for, and JAXCOMM_BACKEND=xla gives XLA all "
        f"calls that name no backend. Unset the variable; or leave backend out here, "
        f"and pass backend={name!r} to calls or to jaxcomm.using"
    )


def _lane_names(lanes) -> tuple[str, ...]:
    names = (lanes,) if isinstance(lanes, str) else lanes
    if isinstance(names, set | frozenset):
        raise TypeError(
            f"init: lanes must be in order, got the set {lanes!r}: each process makes "
            f"them in its own order of the set. Pass a tuple or a list"
        )
    if not isinstance(names, Iterable):
        raise TypeError(
            f"init: lanes must be names, got {lanes!r}. Pass one for each lane, as in "
            f"lanes=('keys', 'values'); how many there may be is CommPolicy(lanes=...)."
        )
    names = tuple(names)
    if not names:
        raise ValueError("init: lanes is empty, which makes nothing. Pass a name")
    for name in names:
        check_lane(name, "lane")
    return names


def seconds_of(timeout, name: str) -> float | None:
    """Return the seconds of a ``timeout=`` of the function ``name``; None as it is."""
    if timeout is None:
        return None
    if isinstance(timeout, datetime.timedelta):
        timeout = timeout.total_seconds()
    numbers = int | float | np.integer | np.floating
    if isinstance(timeout, bool) or not isinstance(timeout, numbers):
        raise TypeError(
            f"{name}: timeout must be a number of seconds, a datetime.timedelta or "
            f"None, got {timeout!r}"
        )
    if not config.is_in_range(timeout):
        raise ValueError(
            f"{name}: timeout must be a positive number of seconds, got {timeout!r}; "
            f"pass many, such as 86400, for a wait that nearly never ends"
        )
    return float(timeout)
