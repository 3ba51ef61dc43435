"""Making NCCL communicators: one for all devices of a mesh, the others split off it.

What is made, and in which order, depends on the mesh and the policy alone, which are
the same on every process: NCCL hangs where one process splits and another does not.
"""

import os
import warnings
import weakref
from typing import Any

import jax

from jaxcomm import config
from jaxcomm._built import _ffi
from jaxcomm.communicator import failures, hosts, rendezvous
from jaxcomm.communicator.backends.backend import CommunicatorSpec
from jaxcomm.communicator.policy import CommPolicy
from jaxcomm.errors import CommunicatorError

# Variables that set how much memory a communicator takes, and NCCL's own choices.
_FIFO = "NCCL_WORK_FIFO_BYTES"
_BUFFERS = {_FIFO: 1 << 20, "NCCL_WORK_FIFO_DEPTH": 1 << 16, "NCCL_BUFFSIZE": 4 << 20}
# What the extension says if it waited in vain, see failure/wait.cc.
_LATE = "other processes may not have come to it"
# By the devices of the mesh, in order of their ids, and what its policy sets.
_worlds: "weakref.WeakValueDictionary[tuple, _ffi.NcclWorld]" = (
    weakref.WeakValueDictionary()
)


def create(spec: CommunicatorSpec) -> "tuple[_ffi.NcclWorld, bool, int]":
    """Make a communicator and the mesh's own, if that is not there yet.

    Every process of the mesh must call this, in the same order.

    Returns:
      The world it was split off, which lives as long as somebody holds it; whether
      that is a new one; and how many hosts a group spans at most.
    """
    _warn_of_large_buffers()
    policy = policy_of(spec)
    process_of = {device.id: device.process_index for device in spec.mesh.devices.flat}
    groups = spec.partition.groups
    world, unique_id, peers, host_of = _agree_on_world(spec)
    is_new = world is None
    try:
        if world is None:
            unique_id = unique_id or _ffi.nccl_unique_id().hex()
            world = _new_world(spec, unique_id, peers)
        _ffi.create_nccl(
            world=world,
            key=spec.key,
            axes=str(spec.partition.axes),
            lane=spec.lane,
            platform=spec.platform,
            timeout_seconds=spec.timeout,
            groups=[list(group) for group in groups],
            processes=[[process_of[id_] for id_ in group] for group in groups],
            numbers=_config(spec),
            name=policy.name or "",
            copy_engines=policy.uses_copy_engines,
            one_shot=policy.uses_one_shot,
            device_sizes=policy.device_sizes,
            arena_bytes=policy.arena_bytes,
            on_failure=_on_failure(spec),
            check=config.check(),
        )
    except BaseException as error:
        # NCCL ends what shares resources with what it could not make. And a traceback
        # may hold the world, which nobody is to find again.
        _worlds.clear()
        if not isinstance(error, RuntimeError):
            raise
        # All that came wait as long.
        kind = rendezvous.LateError if _LATE in str(error) else CommunicatorError
        raise kind(
            f"NCCL did not make a communicator over {spec} of "
            f"{spec.mesh.devices.size} devices: {error}"
        ) from None
    hosts_of = ({host_of[process_of[id_]] for id_ in group} for group in groups)
    return world, is_new, max(map(len, hosts_of))


def forget() -> None:
    """Let go of the communicators of whole meshes; the next are new ones."""
    _worlds.clear()
    _ffi.forget_failures()


def policy_of(spec: CommunicatorSpec) -> CommPolicy:
    """Return how a communicator is made; the backend takes a policy."""
    assert spec.policy is not None
    return spec.policy


def shares(spec: CommunicatorSpec) -> bool:
    """Return whether a communicator uses the buffers of the mesh's."""
    return policy_of(spec).shares(spec.is_default_lane)


def pinned_bytes(spec: CommunicatorSpec) -> int:
    """Return the page-locked memory in which NCCL queues work for a communicator."""
    here = {device.id for device in jax.local_devices(backend=spec.platform)}
    groups = [group for group in spec.partition.groups if len(group) > 1]
    ranks = sum(id_ in here for group in groups for id_ in group)
    text = os.environ.get(_FIFO, "")
    return ranks * (int(text) if text.isdigit() else _BUFFERS[_FIFO])


def _config(spec: CommunicatorSpec) -> dict[str, int]:
    """Return the fields of ``ncclConfig_t`` that are not left to NCCL."""
    policy = policy_of(spec)
    fields = {
        "maxCTAs": policy.max_ctas,
        "minCTAs": policy.min_ctas,
        "cgaClusterSize": policy.cga_cluster_size,
        "trafficClass": policy.traffic_class,
        "maxP2pPeers": policy.max_p2p_peers,
        "blocking": None if policy.blocking is None else int(policy.blocking),
        "splitShare": int(shares(spec)),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _on_failure(spec: CommunicatorSpec) -> str:
    chosen = policy_of(spec).on_failure
    if chosen is not None:
        return chosen
    return "raise" if len(spec.processes) == 1 else "exit"


def _world_name(spec: CommunicatorSpec) -> tuple:
    ids = tuple(sorted(spec.grid.device_ids))
    # Children share with a parent as the parent's config says. Those that share fail
    # together, in one way.
    return ids, tuple(_config(spec).items()), policy_of(spec).on_failure


def _agree_on_world(
    spec: CommunicatorSpec,
) -> "tuple[_ffi.NcclWorld | None, str | None, list[hosts.Peer], dict[int, Any]]":
    """Meet the other processes of the mesh: all are to make the same communicator.

    NCCL would hang where they are not.

    Returns:
      The mesh's own communicator, None if a new one is to be made; then also its id,
      if others must have it too, and the processes to watch. Last the host of each
      process, by a name.
    """
    world = _worlds.get(_world_name(spec))
    if world is not None and world.is_broken:
        world = None
    processes, here = spec.processes, jax.process_index()
    if len(processes) == 1:
        return world, None, [], {here: None}
    purpose = (
        f"make a communicator over axes {spec.partition.axes}, lane {spec.lane!r}, "
        f"with {_config(spec)}, {_on_failure(spec)} on failure"
        f"{', checked' if config.check() else ''} (key {spec.key:x})"
    )
    unique_id = refused = None
    if world is None and here == processes[0]:
        try:
            unique_id = _ffi.nccl_unique_id().hex()
        except RuntimeError as error:
            refused = str(error)
    mine: dict[str, Any] = {
        "id": unique_id, "refused": refused, "has_world": world is not None,
        "host": hosts.folder(),
    }  # fmt: skip
    hosts.publish(processes, here)
    met = rendezvous.meet(processes, here, purpose, mine)
    host_of = {process: value["host"] for process, value in met.items()}
    if refused := met[processes[0]]["refused"]:
        raise CommunicatorError(f"process {processes[0]}: {refused}")
    if all(value["has_world"] for value in met.values()):
        return world, None, [], host_of
    unique_id = met[processes[0]]["id"]
    if unique_id is None:
        # The first process has one that is broken, or gone, on another.
        new = _ffi.nccl_unique_id().hex() if here == processes[0] else None
        answers = rendezvous.exchange(processes, here, "NCCL's id", new)
        unique_id = answers[processes[0]]
    return None, unique_id, hosts.peers(processes, here), host_of


def _new_world(
    spec: CommunicatorSpec, unique_id: str, peers: list[hosts.Peer]
) -> "_ffi.NcclWorld":
    in_order = sorted(spec.mesh.devices.flat, key=lambda device: device.id)
    world = _ffi.nccl_world(
        size=len(in_order),
        devices=[
            (device.id, device.local_hardware_id, rank)
            for rank, device in enumerate(in_order)
            if device.process_index == jax.process_index()
        ],
        unique_id=bytes.fromhex(unique_id),
        numbers=_config(spec),
        name=policy_of(spec).name or "",
        timeout_seconds=config.timeout_seconds(),
        peers=peers,
    )
    if len(spec.processes) > 1:
        poisons = _on_failure(spec) == "poison"
        failures.watch(unique_id, world, spec.processes, settles=poisons)
    _worlds[_world_name(spec)] = world
    return world


def _warn_of_large_buffers() -> None:
    for name, default in _BUFFERS.items():
        text = os.environ.get(name, "")
        if text.isdigit() and int(text) > default:
            warnings.warn(
                f"{name}={text} is more than NCCL's {default}: every communicator "
                f"takes that much more memory, for each of its channels and peers",
                stacklevel=7,  # who called jaxcomm.init
            )
