"""How a lost process that was started again comes back: :func:`grow`.

The processes that go on are *those here*; the ones that were started again *wait*.

=============  =========================================================================
step           what is done, and what ends it
=============  =========================================================================
say            who waits writes its start into the store of the whole job
decide         the first one here that looks writes who is taken in; all here read that
gather         those here meet: nobody is in a step any more. All raise if a process
               that is not of the mesh lives: it could not enter the epoch
enter          all close their communicators and enter an *epoch*: a store without
               entries. What one was told or counted before has no meaning there
meet           those here and those taken in compare meshes and states
copy           one row of the mesh sends its state to all
agree          each says whether that went well. If not, all raise
=============  =========================================================================

Each wait is one of :mod:`~jaxcomm.communicator.rendezvous`, which ends when a process
ends or the timeout is over, for all alike. After an error those here hold what they
had, and :func:`shrink` makes their communicators again. A process that was not taken in
ends, and may be started again.
"""

import hashlib
import time
from collections.abc import Collection

import jax
import numpy as np

from jaxcomm import config
from jaxcomm.communicator import (
    cache,
    forks,
    hosts,
    membership,
    rendezvous,
)
from jaxcomm.communicator.backends.backend import processes_of
from jaxcomm.communicator.backends.nccl import registration
from jaxcomm.communicator.out_of_step import listed, names
from jaxcomm.communicator.store import enter, of_job, of_whole_job
from jaxcomm.communicator.survivors import rounds_of, wholes
from jaxcomm.errors import CommunicatorError

# Who waits, by process; and what became of that, by process and start.
_WAITING, _TAKEN = "jaxcomm/waiting-to-join", "jaxcomm/taken-in"
_DECISIONS = "jaxcomm/decisions"
_LOOK_SECONDS = 0.05
_STEP_SECONDS = 1.0

# The epoch that this process is in, and how often it looked there who waits, by the
# processes here and how often they had agreed who is left.
_epoch = ""
_looks: dict[tuple, int] = {}


def take_in(
    mesh: jax.sharding.Mesh, axis: str, wait: float, seconds: float
) -> tuple[jax.sharding.Mesh, int, int] | None:
    """Take in the processes that wait, or be taken in.

    Args:
      mesh, axis, wait: as of :func:`jaxcomm.grow`.
      seconds: to wait for the others, if this process was started again.

    Returns:
      The bigger mesh, the first of its rows that was here, and the first process that
      was. None if nobody is taken in.
    """
    me, start = jax.process_index(), config.starts()
    whole = wholes.get(mesh, mesh)
    if start and not membership.is_taken_in():
        if hosts.starts().get(me, 0) == start:
            membership.check_taken_in(me, "grow is called again")
        here, taken = _join(mesh, me, start, seconds)
    else:
        here = processes_of(mesh)
        missing = {*processes_of(whole)} - {*here}
        if not missing:
            return None
        forks.take_part("grow is called")
        rendezvous.check_member(here, me)
        place = here, rounds_of(here, me), _epoch
        _looks[place] = _looks.get(place, 0) + 1
        name = hashlib.sha256(repr((place, _looks[place])).encode()).hexdigest()[:16]
        taken = _decide(whole, axis, here, missing, me, wait, name)
        if not taken:
            return None
        _gather(whole, here, taken, me, name)
    bigger, source = with_rows_of(whole, axis, here, taken)
    if bigger is not whole:
        wholes[bigger] = whole
    hosts.publish(processes_of(bigger), me)
    return bigger, source, min(here)


def _join(mesh, me: int, start: int, seconds: float):
    """Wait until this process is taken in; return by whom, and who else is."""
    processes = processes_of(mesh)
    store = of_whole_job(processes)
    store.set(f"{_WAITING}/{me}", start, me)
    end = time.monotonic() + seconds
    found = None
    while found is None:
        rest = end - time.monotonic()
        if rest <= 0:
            raise CommunicatorError(
                f"process {me} was started again, and the others did not take it in "
                f"within {seconds:g} s. They must call jaxcomm.grow between two steps"
            )
        found = store.wait(f"{_TAKEN}/{me}-{start}", min(rest, _STEP_SECONDS))
    epoch, here, taken, starts = found
    _enter(processes, epoch, {int(p): n for p, n in starts.items()})
    return tuple(here), {int(p): n for p, n in taken.items()}


def _decide(whole, axis, here, missing, me: int, wait: float, name: str):
    """Return the start of each process that all here take in; the same on all.

    Args:
      whole: the mesh from before all losses.
      axis: of its rows.
      here: processes.
      missing: the processes of the mesh that are not here.
      me: this process.
      wait: seconds to wait for all of them.
      name: of the decision.
    """
    store, of_all = of_job(here), of_whole_job(here)
    key = f"{_DECISIONS}/{name}"
    end = time.monotonic() + wait
    while (found := store.get(key)) is None:
        came = of_all.entries(_WAITING, missing)
        known = hosts.starts()
        came = {p: start for p, start in came.items() if start > known.get(p, 0)}
        gone = hosts.told_ends(came)
        came = {p: start for p, start in came.items() if p not in gone}
        if came.keys() == missing or time.monotonic() >= end:
            bigger, _ = with_rows_of(whole, axis, here, came)
            complete = {*processes_of(bigger)}
            store.set_once(key, {p: n for p, n in came.items() if p in complete}, me)
        else:
            time.sleep(_LOOK_SECONDS)
    return {int(process): start for process, start in found.items()}


def _gather(whole, here, taken: dict[int, int], me: int, epoch: str) -> None:
    """Meet the others here, then enter an epoch with those that are taken in."""
    who = listed(sorted(taken))
    outside = {*range(jax.process_count())} - {*processes_of(whole)}
    left = sorted(outside - hosts.ended(outside, me))
    found = rendezvous.meet(here, me, f"take in {who} (jaxcomm.grow)", left)
    # One that some here saw end counts as ended: all raise, or none.
    if living := set.intersection(*map(set, found.values())):
        raise ValueError(
            f"grow: processes {names(here)} are to take in {who}, and "
            f"{listed(sorted(living))} outside of the mesh did not end. No later call "
            f"could join the two sets. Call jaxcomm.shrink and jaxcomm.grow with a "
            f"mesh of all processes of the job"
        )
    cache.leave()
    registration.forget(taken)
    starts = hosts.starts() | taken
    for process, start in taken.items():
        found = [epoch, here, taken, starts]
        of_whole_job(here).set(f"{_TAKEN}/{process}-{start}", found, me)
    _enter(here, epoch, starts)


def _enter(processes, epoch: str, starts: dict[int, int]) -> None:
    global _epoch
    _epoch = epoch
    _looks.clear()
    hosts.take_in(starts)
    enter(processes, epoch)


def with_rows_of(
    whole: jax.sharding.Mesh, axis: str, here: Collection[int], more: Collection[int]
) -> tuple[jax.sharding.Mesh, int]:
    """Return the mesh of the rows that some processes make complete.

    And the first of them that was so before.
    """
    position = whole.axis_names.index(axis)
    others = tuple(i for i in range(whole.devices.ndim) if i != position)
    process = np.vectorize(lambda device: device.process_index)(whole.devices)
    is_here = np.isin(process, [*here]).all(axis=others)
    is_whole = np.isin(process, [*here, *more]).all(axis=others)
    source = int(np.flatnonzero(np.compress(is_whole, is_here))[0])
    if is_whole.all():
        return whole, source
    devices = np.compress(is_whole, whole.devices, axis=position)
    mesh = jax.sharding.Mesh(devices, whole.axis_names, axis_types=whole.axis_types)
    return mesh, source
