""":func:`jaxcomm.grow`: lost processes that were started again come back."""

import datetime
from typing import TypeVar

import jax

from jaxcomm import compat, config
from jaxcomm.collectives.rooted import pbroadcast
from jaxcomm.communicator import (
    cache,
    growth,
    membership,
    presence,
    rendezvous,
)
from jaxcomm.communicator.backends.backend import processes_of
from jaxcomm.communicator.init import init, seconds_of
from jaxcomm.communicator.out_of_step import listed
from jaxcomm.communicator.policy import CommPolicy
from jaxcomm.communicator.raise_if_failed import raise_if_failed
from jaxcomm.errors import CommunicatorError

_Tree = TypeVar("_Tree")

_LANE = "jaxcomm.grow"
_PLAIN = bool, int, float, str, type(None)


def grow(
    mesh: jax.sharding.Mesh,
    axis: str,
    state: _Tree,
    *,
    wait: float = 0.0,
    timeout: float | datetime.timedelta | None = None,
) -> tuple[jax.sharding.Mesh, _Tree]:
    """Take in lost processes that were started again, and give them the state.

    Call it between two steps, on every process of the mesh, as often on each. While
    nobody is missing it sends nothing. In a process that was started again it waits for
    the others: call it before :func:`init`, with the mesh and a state as in the
    beginning. ``python -m jaxcomm.launch --elastic --rejoin 3`` starts processes again.

    If it takes in anybody, it closes all communicators and forgets what :func:`init`
    chose, on all processes: call :func:`init` again, or run programs that make them.

    Args:
      mesh: of the programs, after all calls of :func:`shrink`. In a process that was
        started again: the mesh from before all losses.
      axis: name of the axis that :func:`shrink` made shorter.
      state: a pytree of arrays on the mesh, none of them sharded over ``axis``, and of
        Python's numbers, texts and None. Shapes, dtypes and specs are the same on all.
      wait: seconds to wait until all lost processes have come. By default it takes in
        those that wait already.
      timeout: seconds (or a ``datetime.timedelta``) that a process that was started
        again waits for the others. If None, the ``JAXCOMM_TIMEOUT`` variable, else
        300 s. What follows takes ``JAXCOMM_TIMEOUT`` at most.

    Returns:
      The mesh and the state themselves if it took in nobody. Otherwise a mesh with rows
      that are complete again, and the state of one that was here, the same bits on all.

    Raises:
      TypeError: if the mesh is none, or the state has other leaves.
      ValueError: if the mesh has no such axis, or an array is sharded over it or is on
        another mesh. Also if it would take in a process while one lives that is not of
        the mesh from before all losses: no later call could join the two.
      CommunicatorError: if a process ended meanwhile or did not come, gave another mesh
        or state. The others have what they had: go on with :func:`shrink`.

    Example:
      >>> mesh = jax.make_mesh((2, 4), ("data", "context"))
      >>> jaxcomm.grow(mesh, "data", {"step": 7}) == (mesh, {"step": 7})
      True
    """
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(
            f"grow: mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}"
        )
    if axis not in mesh.axis_names:
        raise ValueError(f"grow: {axis!r} is no axis of {mesh.axis_names}")
    seconds = seconds_of(timeout, "grow") or config.timeout_seconds()
    leaves, structure = jax.tree.flatten(state)
    for leaf in leaves:
        _check(leaf, mesh, axis)
    found = growth.take_in(mesh, axis, wait, seconds)
    if found is None:
        return mesh, state
    bigger, source, by = found
    try:
        leaves = _share(bigger, axis, source, by, leaves, str(structure))
    except rendezvous.LateError as error:
        # One that hangs would keep its GPUs, and never be started again.
        presence.give_up({*error.processes} - {*processes_of(mesh)})
        raise
    cache.finalize()
    membership.take_in_this()
    return bigger, jax.tree.unflatten(structure, leaves)


def _check(leaf, mesh, axis):
    if isinstance(leaf, _PLAIN):
        return
    if not isinstance(leaf, jax.Array) or compat.is_tracer(leaf):
        raise TypeError(
            f"grow: the state has a {type(leaf).__name__}; it may have jax.Array, and "
            f"numbers, texts and None of Python"
        )
    sharding = leaf.sharding
    if not isinstance(sharding, jax.NamedSharding) or sharding.mesh != mesh:
        raise ValueError(
            f"grow: an array of the state is on {sharding}, not on the mesh. Put it "
            f"there by jax.make_array_from_callback"
        )
    if axis in jax.tree.leaves([*sharding.spec]):
        raise ValueError(
            f"grow: an array of the state is sharded over {axis!r}: {sharding.spec}. "
            f"No other process has the part of a lost one. Replicate it over {axis!r}"
        )


def _spec_of(array: jax.Array) -> jax.P:
    """Return how an array that _check() accepts lies on its mesh."""
    assert isinstance(array.sharding, jax.NamedSharding)
    return array.sharding.spec


def _share(
    mesh: jax.sharding.Mesh, axis: str, source: int, by: int, leaves: list, form: str
) -> list:
    """Return the leaves of a row of the mesh on all of it.

    Args:
      mesh: the bigger one.
      axis: of the rows.
      source: the row, by its place in the mesh.
      by: the process whose Python's values count.
      leaves: of this process.
      form: of the tree that they are of.
    """
    processes, me = processes_of(mesh), jax.process_index()
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    plain = [leaf for leaf in leaves if not isinstance(leaf, jax.Array)]
    specs = [_spec_of(leaf) for leaf in arrays]
    forms = [
        [form, [str(device) for device in mesh.devices.flat]],
        [f"{x.dtype}{x.shape} {spec}" for x, spec in zip(arrays, specs, strict=True)],
    ]
    purpose = "share the state (jaxcomm.grow)"
    found = rendezvous.meet(processes, me, purpose, [forms, plain])
    other = [process for process, (given, _) in found.items() if given != found[by][0]]
    if other:
        raise CommunicatorError(
            f"grow: {listed(other)} gave another mesh or state than process {by}: "
            f"{found[other[0]][0]}, not {found[by][0]}"
        )
    error = ""
    try:
        arrays = _copied(mesh, axis, source, arrays, specs)
    except (CommunicatorError, jax.errors.JaxRuntimeError, ValueError) as failed:
        error = f"process {me}: {failed}"
    found_errors = rendezvous.meet(processes, me, purpose, error)
    if errors := [text for text in found_errors.values() if text]:
        raise CommunicatorError(f"grow: the state was not copied: {errors[0]}")
    values = {True: iter(arrays), False: iter(found[by][1])}
    return [next(values[isinstance(leaf, jax.Array)]) for leaf in leaves]


def _copied(mesh, axis, source, arrays, specs):
    """Return arrays on a mesh, as a row of it has them."""
    if not arrays:
        return arrays
    # A failure is to end nobody.
    policy = CommPolicy(on_failure="poison")
    made = init(mesh, axis, lanes=_LANE, policy=policy)
    try:
        mine = [device for device in mesh.devices.flat if device in mesh.local_devices]

        def placed(array, spec):
            parts = {shard.device: shard.data for shard in array.addressable_shards}
            some = next(iter(parts.values()))
            # A device whose row had left with others of the row has none yet.
            return jax.make_array_from_single_device_arrays(
                array.shape,
                jax.NamedSharding(mesh, spec),
                [
                    parts[device] if device in parts else jax.device_put(some, device)
                    for device in mine
                ],
            )

        def send(arrays):
            return pbroadcast(arrays, axis, source, lane=_LANE)

        specs = tuple(specs)
        program = jax.shard_map(
            send, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False
        )
        return raise_if_failed(jax.jit(program)(tuple(map(placed, arrays, specs))))
    finally:
        for member in made:
            member.close()
