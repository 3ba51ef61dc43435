"""Which processes go on after a failure, and the mesh of their devices.

Processes agree in numbered rounds, see :mod:`~jaxcomm.communicator.presence`. A process
that comes later learns that it was given up.
"""

import datetime
import hashlib
import sys
import weakref

import jax
import numpy as np

from jaxcomm import config
from jaxcomm.communicator import (
    cache,
    forks,
    hosts,
    membership,
    presence,
    rendezvous,
)
from jaxcomm.communicator.backends.backend import processes_of
from jaxcomm.communicator.init import seconds_of
from jaxcomm.communicator.rendezvous import SURVIVORS, names
from jaxcomm.communicator.store import Store, of_job
from jaxcomm.errors import CommunicatorError

# The rounds that a process has been through, by the processes and itself: who was left.
_past: weakref.WeakKeyDictionary[Store, dict[tuple, list[list[int]]]] = (
    weakref.WeakKeyDictionary()
)

# The mesh that a smaller one was before all losses.
wholes: dict[jax.sharding.Mesh, jax.sharding.Mesh] = {}


def mesh_of_survivors(
    mesh: jax.sharding.Mesh,
    axis: str,
    *,
    timeout: float | datetime.timedelta | None = None,
) -> jax.sharding.Mesh:
    """Return a mesh without the rows of an axis that have lost a process.

    Call it after a failure, on every process of the mesh that lives. All of them return
    the same mesh, or raise. It makes and closes no communicators: see :func:`shrink`.

    It waits until every other process has come or has ended. A process sees others end
    on its own host. Any process that has not come after the timeout is given up: if it
    comes later, it raises.

    Args:
      mesh: the mesh of the programs that failed.
      axis: name of the axis to shorten. Programs must be able to go on without any of
        its rows, as in data parallelism.
      timeout: seconds (or a ``datetime.timedelta``) to wait for processes that have
        neither come nor ended. If None, the ``JAXCOMM_TIMEOUT`` variable, else 300 s.

    Returns:
      The mesh itself if nothing is lost. Otherwise one with fewer rows along ``axis``.
      A row leaves if any of its devices belongs to a lost process. The line on stderr
      says what left.

    Raises:
      TypeError: if the mesh is none.
      ValueError: if the mesh has no such axis.
      CommunicatorError: if this process was given up, has no device in the mesh, or
        only devices of rows that left; or if no row is whole.

    Example:
      >>> mesh = jax.make_mesh((2, 4), ("data", "context"))
      >>> jaxcomm.mesh_of_survivors(mesh, "data") is mesh
      True
    """
    return _survivors(mesh, axis, timeout, "mesh_of_survivors")


def _survivors(mesh, axis, timeout, what: str) -> jax.sharding.Mesh:
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(
            f"{what}: mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}"
        )
    if axis not in mesh.axis_names:
        raise ValueError(f"{what}: {axis!r} is no axis of {mesh.axis_names}")
    forks.take_part(f"{what} is called")
    membership.check_taken_in(jax.process_index(), f"{what} is called")
    seconds = seconds_of(timeout, what) or config.timeout_seconds()
    processes, me = processes_of(mesh), jax.process_index()
    rendezvous.check_member(processes, me)
    if processes == (me,):
        return mesh
    living = _agree(processes, me, seconds)
    lost = sorted({*processes} - {*living})
    return mesh if not lost else _without(mesh, axis, lost, me)


def shrink(
    mesh: jax.sharding.Mesh,
    axis: str,
    *,
    timeout: float | datetime.timedelta | None = None,
) -> jax.sharding.Mesh:
    """Return what :func:`mesh_of_survivors` returns, with communicators to go on with.

    It closes communicators between processes, and makes them anew:

    * those of ``mesh`` for the new mesh, with what :func:`init` chose for them;
    * those of another mesh that lost processes once that mesh is shrunk, too;
    * those whose processes all live and call this under their keys: programs compiled
      for them go on.

    It keeps communicators within this process, and those that lost nobody and join
    processes outside of ``mesh``. On GPUs it closes these as well, since all of a
    process fail together. It makes them anew once all of their processes shrink their
    mesh. If another process ends meanwhile, or does not come to make communicators
    within ``JAXCOMM_TIMEOUT``, it begins again without that process.

    Args:
      mesh, axis, timeout: as of :func:`mesh_of_survivors`.

    Returns:
      The mesh itself if nothing is lost: then a rank was late, or the program failed by
      itself. Take the step again, a few times at most. Otherwise a smaller mesh.

    Raises:
      TypeError, ValueError, CommunicatorError: as :func:`mesh_of_survivors`.
      CommunicatorError: also if a communicator cannot be made, and nobody was lost by
        that.

    Example:
      >>> mesh = jax.make_mesh((2, 4), ("data", "context"))
      >>> jaxcomm.shrink(mesh, "data") is mesh
      True
    """
    smaller = _survivors(mesh, axis, timeout, "shrink")
    was_anyone_lost = True
    while True:
        try:
            cache.move(mesh, smaller)
        except CommunicatorError as error:
            # If it failed here alone, the others do not come to agree.
            is_lost = isinstance(error, rendezvous.LateError) or hosts.ended(
                processes_of(smaller), jax.process_index()
            )
            if not is_lost or not was_anyone_lost:
                raise
            mesh, smaller = smaller, _survivors(smaller, axis, timeout, "shrink")
            was_anyone_lost = smaller is not mesh
        else:
            return smaller


def _agree(processes: tuple[int, ...], me: int, seconds: float) -> list[int]:
    """Return those of the processes that came and live; the same on all of them."""
    store = of_job(processes)
    rounds = _past.setdefault(store, {}).setdefault((processes, me), [])
    candidates = rounds[-1] if rounds else list(processes)
    name = hashlib.sha256(repr(processes).encode()).hexdigest()[:16]
    folder = f"{SURVIVORS}/{name}/{len(rounds)}"
    outcome = presence.outcome_of(store, folder)
    if outcome is None:
        hosts.publish(processes, me)
        rendezvous.tell_waiting(
            store, processes, me, folder, "agree who is left (jaxcomm.shrink)"
        )
        try:
            outcome = presence.who_came(
                store, folder, candidates, me, seconds,
                lambda: hosts.ended(candidates, me)
                | presence.given_up(store, candidates),
            )  # fmt: skip
        finally:
            rendezvous.forget_waiting(store, me)
    if me not in outcome:
        raise CommunicatorError(
            f"process {me} came too late: the others of {names(processes)} had waited "
            f"for it, and gave it up. {names(outcome)} go on without it. End this "
            f"process"
        )
    presence.give_up({*candidates} - {*outcome})
    rounds.append(outcome)
    return outcome


def rounds_of(processes: tuple[int, ...], me: int) -> int:
    """Return how often some processes have agreed who is left."""
    return len(_past.get(of_job(processes), {}).get((processes, me), ()))


def _without(
    mesh: jax.sharding.Mesh, axis: str, lost: list[int], me: int
) -> jax.sharding.Mesh:
    position = mesh.axis_names.index(axis)
    is_lost = np.vectorize(lambda device: device.process_index in lost)(mesh.devices)
    others = tuple(i for i in range(mesh.devices.ndim) if i != position)
    left = np.flatnonzero(is_lost.any(axis=others))
    text = (
        f"process{'es' if len(lost) > 1 else ''} {', '.join(map(str, lost))} lost: "
        f"axis {axis!r} goes on without {len(left)} of its "
        f"{mesh.devices.shape[position]} rows ({', '.join(map(str, left))})"
    )
    devices = np.delete(mesh.devices, left, axis=position)
    if devices.size == 0:
        raise CommunicatorError(f"{text}: none is left. Start the job again")
    smaller = jax.sharding.Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
    wholes[smaller] = wholes.get(mesh, mesh)
    living = processes_of(smaller)
    if me not in living:
        raise CommunicatorError(
            f"{text}. Process {me} has devices in these rows alone. End this process"
        )
    if me == living[0]:
        idle = sorted({*processes_of(mesh)} - {*lost} - {*living})
        more = f"; process {names(idle)} leaves with them" if idle else ""
        print(f"jaxcomm: {text}{more}", file=sys.stderr, flush=True)
    return smaller
