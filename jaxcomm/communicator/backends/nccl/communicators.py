"""Making NCCL communicators: one for all devices of a mesh, the others split off it.

What is made, and in which order, depends on the mesh and the policy alone, which are
the same on every process: NCCL hangs where one process splits and another does not.
"""

import hashlib
import os
import warnings
import weakref
from typing import TYPE_CHECKING

import jax

from jaxcomm import _ffi, config
from jaxcomm.communicator import failures, rendezvous
from jaxcomm.communicator.backends.nccl import library
from jaxcomm.errors import CommunicatorError

if TYPE_CHECKING:
    from jaxcomm.communicator.communicator import Communicator

# Variables that say how much memory a communicator takes, and NCCL's own choices.
_FIFO = "NCCL_WORK_FIFO_BYTES"
_BUFFERS = {_FIFO: 1 << 20, "NCCL_WORK_FIFO_DEPTH": 1 << 16, "NCCL_BUFFSIZE": 4 << 20}
# By the devices of the mesh, in order of their ids, and what its policy sets.
_worlds: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
# Why NCCL cannot serve devices of a platform, by the processes that agreed on it.
_refusals: dict[tuple, str | None] = {}
# How many communicators this process began to make with others, by the processes.
_begun: dict[tuple[int, ...], int] = {}


def create(mesh, part, member: "Communicator", policy, shares: bool):
    """Makes a communicator and the mesh's own, if that is not there yet.

    Every process of the mesh must call this, in the same order.

    Returns:
      The world it was split off, which lives as long as somebody holds it; and whether
      that is a new one.

    Raises:
      CommunicatorError: NCCL refused, or other processes did not come, or came to make
        another communicator.
    """
    _warn_of_large_buffers()
    process_of = {device.id: device.process_index for device in mesh.devices.flat}
    world, unique_id, peers = _agree_on_world(mesh, part, member, policy, shares)
    is_new = world is None
    try:
        if world is None:
            unique_id = unique_id or _ffi.nccl_unique_id().hex()
            world = _new_world(mesh, policy, shares, unique_id, peers)
        _ffi.create_nccl(
            world=world,
            key=member.key,
            axes=str(part.axes),
            lane=member.lane,
            platform=member.platform,
            timeout_seconds=member.timeout,
            groups=[list(group) for group in part.groups],
            processes=[[process_of[id_] for id_ in group] for group in part.groups],
            numbers=_numbers(policy, shares),
            name=policy.name or "",
            copy_engines=policy.uses_copy_engines,
            one_shot=policy.uses_one_shot,
            on_failure=_on_failure(mesh, policy),
            check=config.check(),
        )
    except BaseException as error:
        # NCCL ends what shares resources with what it could not make. And a traceback
        # may hold the world, which nobody is to find again.
        _worlds.clear()
        if not isinstance(error, RuntimeError):
            raise
        raise CommunicatorError(
            f"NCCL did not make a communicator over axes {part.axes} (lane "
            f"{member.lane!r}) of {mesh.devices.size} devices: {error}"
        ) from None
    return world, is_new


def borrow(mesh, part, member: "Communicator") -> None:
    """Makes a communicator that borrows XLA's for each of its operations.

    Raises:
      CommunicatorError: where XLA lends none.
    """
    if member.platform == "cpu" or not _ffi.can_borrow():
        found = (
            "these are CPU devices"
            if member.platform == "cpu"
            else "this package was built with an older one"
        )
        raise CommunicatorError(
            f"CommPolicy(source='xla') for axes {part.axes} (lane {member.lane!r}): "
            f"XLA lends communicators of NVIDIA GPUs from jaxlib 0.11.2 on, and "
            f"{found}. Use source='own'"
        )
    place_of = {device.id: place for place, device in enumerate(mesh.devices.flat)}
    # 0 and 1 are XLA's collectives and sends.
    digest = hashlib.sha256(member.lane.encode()).digest()
    communication_id = 16 + int.from_bytes(digest[:3], "little")
    _ffi.borrow_nccl(
        key=member.key,
        axes=str(part.axes),
        lane=member.lane,
        platform=member.platform,
        timeout_seconds=member.timeout,
        groups=[list(group) for group in part.groups],
        devices=[(device.id, ordinal(device)) for device in mesh.local_devices],
        places=[[place_of[id_] for id_ in group] for group in part.groups],
        communication_id=communication_id,
        on_failure=_on_failure(mesh, member.policy),
    )


def forget() -> None:
    """Lets go of the communicators of whole meshes; the next are new ones."""
    _worlds.clear()
    _refusals.clear()
    _ffi.forget_failures()


def pinned_bytes(member: "Communicator") -> int:
    """Returns the page-locked memory in which NCCL queues work for a communicator."""
    if member.world is None:
        return 0
    here = {device.id for device in jax.local_devices(backend=member.platform)}
    ranks = sum(
        id_ in here for group in member.groups if len(group) > 1 for id_ in group
    )
    text = os.environ.get(_FIFO, "")
    return ranks * (int(text) if text.isdigit() else _BUFFERS[_FIFO])


def processes_of(mesh) -> tuple[int, ...]:
    """Returns the processes that have devices in the mesh, in order."""
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def refusal(mesh) -> str | None:
    """Returns why NCCL cannot serve the mesh, None if it can; alike on all processes.

    Every process of the mesh must call this.
    """
    platform = mesh.devices.flat[0].platform
    try:
        # Before others are waited for, who may have ended.
        _ffi.refuse_if_stopped()
    except RuntimeError as error:
        raise CommunicatorError(str(error)) from None
    mine = library.refusal(platform)
    processes = processes_of(mesh)
    if len(processes) == 1:
        return mine
    if (processes, platform) not in _refusals:
        answers = exchange(mesh, "nccl", mine)
        refused = (f"process {p}: {text}" for p, text in answers.items() if text)
        _refusals[processes, platform] = next(refused, None)
    return _refusals[processes, platform]


def exchange(mesh, what: str, value) -> dict:
    """Returns what each process of a mesh gave; all of them call this.

    Arguments and errors are those of :func:`jaxcomm.communicator.rendezvous.exchange`.
    """
    processes, here = processes_of(mesh), jax.process_index()
    if len(processes) == 1:
        return {here: value}
    return rendezvous.exchange(processes, here, what, value)


def agree(mesh, what: str, refused: str | None) -> None:
    """Raises on every process of a mesh if one of them was refused something.

    Args:
      mesh: whose processes all call this.
      what: was asked for.
      refused: why this process did not get it, None if it did.

    Raises:
      CommunicatorError: if one was refused, or did not come.
    """
    answers = exchange(mesh, what, refused)
    for process, text in answers.items():
        if text is not None:
            who = f" (process {process})" if len(answers) > 1 else ""
            raise CommunicatorError(f"{what}{who}: {text}")


def _numbers(policy, shares):
    return {**policy.settings(), "splitShare": int(shares)}


def _on_failure(mesh, policy) -> str:
    if policy.on_failure is not None:
        return policy.on_failure
    return "raise" if len(processes_of(mesh)) == 1 else "exit"


def _world_name(mesh, policy, shares):
    ids = tuple(sorted(device.id for device in mesh.devices.flat))
    # NCCL goes by what the parent says of sharing with its children, and those that
    # share fail together, in one way.
    return ids, tuple(_numbers(policy, shares).items()), policy.on_failure


def _agree_on_world(mesh, part, member, policy, shares):
    """Meets the other processes of the mesh: all are to make the same communicator.

    NCCL would hang where they are not.

    Returns:
      The mesh's own communicator, None if a new one is to be made; then also its id,
      if others must have it too, and the processes to watch.
    """
    world = _worlds.get(_world_name(mesh, policy, shares))
    if world is not None and world.is_broken:
        world = None
    processes, here = processes_of(mesh), jax.process_index()
    if len(processes) == 1:
        return world, None, []
    _begun[processes] = _begun.get(processes, 0) + 1
    purpose = rendezvous.Purpose(
        f"make a communicator over axes {part.axes}, lane {member.lane!r}, with "
        f"{_numbers(policy, shares)}, {_on_failure(mesh, policy)} on failure"
        f"{', checked' if config.check() else ''}",
        member.key,
        _begun[processes],
    )
    unique_id = refused = None
    if world is None and here == processes[0]:
        try:
            unique_id = _ffi.nccl_unique_id().hex()
        except RuntimeError as error:
            refused = str(error)
    card = {"id": unique_id, "refused": refused, "has_world": world is not None}
    met = rendezvous.meet(processes, here, purpose, card)
    if refused := met.values[processes[0]]["refused"]:
        raise CommunicatorError(f"process {processes[0]}: {refused}")
    if all(card["has_world"] for card in met.values.values()):
        return world, None, []
    unique_id = met.values[processes[0]]["id"]
    if unique_id is None:
        # The first process has one that is broken, or gone, on another.
        unique_id = rendezvous.broadcast(
            processes, here, "nccl", lambda: _ffi.nccl_unique_id().hex()
        )
    return None, unique_id, met.peers


def _new_world(mesh, policy, shares, unique_id, peers):
    devices = sorted(mesh.devices.flat, key=lambda device: device.id)
    world = _ffi.nccl_world(
        size=len(devices),
        devices=[
            (device.id, ordinal(device), rank)
            for rank, device in enumerate(devices)
            if device.process_index == jax.process_index()
        ],
        unique_id=bytes.fromhex(unique_id),
        numbers=_numbers(policy, shares),
        name=policy.name or "",
        timeout_seconds=config.timeout_seconds(),
        peers=peers,
    )
    if len(processes_of(mesh)) > 1:
        failures.watch(unique_id, world)
    _worlds[_world_name(mesh, policy, shares)] = world
    return world


def ordinal(device) -> int:
    """Returns the number by which CUDA knows a device of this process."""
    if device.platform == "cpu":
        return [d.id for d in jax.local_devices(backend="cpu")].index(device.id)
    return device.local_hardware_id


def _warn_of_large_buffers():
    for name, default in _BUFFERS.items():
        text = os.environ.get(name, "")
        if text.isdigit() and int(text) > default:
            warnings.warn(
                f"{name}={text} is more than NCCL's {default}: every communicator "
                f"takes that much more memory, for each of its channels and peers",
                stacklevel=5,
            )
