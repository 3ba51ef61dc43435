""":func:`jaxcomm.plan`: what a layout costs, before there is a device."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxcomm import machine as machines
from jaxcomm.communicator.lane import DEFAULT_LANE, check_lane
from jaxcomm.communicator.policy import CommPolicy
from jaxcomm.machine import Machine
from jaxcomm.planning import attention as attentions
from jaxcomm.planning import communicators as members
from jaxcomm.planning import warnings
from jaxcomm.planning.attention import Attention, PlannedAttention
from jaxcomm.planning.contents import PlannedCall, RankClass
from jaxcomm.planning.cost import cost
from jaxcomm.planning.figure import NOTHING
from jaxcomm.planning.groups import Devices, axes_of
from jaxcomm.planning.result import Plan
from jaxcomm.planning.startup import startup
from jaxcomm.planning.trace import Counted, Reader

# Collectives in which ranks send to all others of their group. NCCL's rings reach the
# two neighbors.
_TO_ALL = {"all_to_all", "ragged_all_to_all", "gather", "scatter"}
# What a strategy of attention sends to all others; the rest to neighbors.
_STRATEGIES_TO_ALL = {"ulysses", "usp"}


def plan(
    mesh: Any,
    work: Any = None,
    *args: Any,
    machine: str | Machine | None = None,
    policy: CommPolicy | None = None,
    lanes: str | Sequence[str] = (DEFAULT_LANE,),
    backend: str | None = None,
    devices_per_process: int | None = None,
) -> Plan:
    """Say what a layout costs in memory and time, without any device.

    Nothing runs: functions are traced, and JAX starts no backend. Devices are numbered
    in row-major order of the mesh's axes, host by host. So the last axis lies within a
    domain of fast links if it fits.

    Every figure says where it is from: measured by a calibration, from a table, or by a
    formula. See the page "Choosing a layout" for the formulas and their errors.

    Args:
      mesh: a dictionary of axis sizes, a ``jax.sharding.Mesh`` or an ``AbstractMesh``.
      work: what a step does. A function: a program that holds a ``jax.shard_map``, with
        ``args`` as global arrays; or what one device does with its own ``args``, under
        the mesh's axis names. A ``jaxcomm.planning.Attention``. Or a list of these,
        functions as ``(function, *args)``. If None, the communicators alone are
        planned, as :func:`jaxcomm.init` makes them.
      *args: of the function, arrays or ``jax.ShapeDtypeStruct``.
      machine: a name, ``"h100"``, ``"h200"``, ``"gb200"`` or ``"cpu"``, or a
        :class:`jaxcomm.Machine`. If None, ``"cpu"`` for a mesh of CPU devices, else an
        H200.
      policy: how NCCL makes communicators. If None, ``CommPolicy()``.
      lanes: of the communicators, if ``work`` is None.
      backend: as for :func:`jaxcomm.init`. If None, ``"nccl"`` for GPUs, ``"host"`` for
        CPU devices of one host.
      devices_per_process: If None, all devices of a host.

    Returns:
      A :class:`jaxcomm.planning.Plan`, which prints as a table.

    Raises:
      TypeError: if mesh is no mesh, or work is of another type.
      ValueError: if the machine or a backend is unknown, or a collective is over an
        axis that the mesh does not have.

    Example:
      >>> gradients = jax.ShapeDtypeStruct((1 << 20,), "float32")
      >>> made = jaxcomm.plan(
      ...     {"data": 4, "model": 8},
      ...     lambda x: jaxcomm.psum(x, "data"),
      ...     gradients,
      ...     machine="h100",
      ... )
      >>> [(row.call.name, row.call.bytes, row.times) for row in made.calls]
      [('psum', 4194304, 1)]
      >>> made.warnings[0]  # doctest: +ELLIPSIS
      "axis 'data' crosses domains and need not: in the order ('model', 'data') ..."
    """
    axes = axes_of(mesh)
    machine = machines.of(_platform(mesh) if machine is None else machine, "plan")
    policy = CommPolicy() if policy is None else policy
    if not isinstance(policy, CommPolicy):
        raise TypeError(f"plan: policy must be a jaxcomm.CommPolicy, got {policy!r}")
    names = (lanes,) if isinstance(lanes, str) else tuple(lanes)
    for name in names:
        check_lane(name, "plan: lane")
    per_process, notes = _per_process(mesh, devices_per_process)
    functions, layers = _split(work, args)
    devices = Devices(axes, machine, per_process)

    def backend_of(of: Devices):
        return lambda over, index_groups, asked: members.backend_of(
            backend if asked is None else asked, machine, of.groups(over, index_groups)
        )

    def seconds_of(of: Devices):
        return lambda counted: sum(
            times * cost(call, of, machine, policy).seconds.value
            for call, times in counted.items()
        )

    reader = Reader(axes, backend_of(devices), seconds_of(devices))
    counted: Counted = collections.Counter()
    for function, *arguments in functions:
        counted.update(reader.read(function, tuple(arguments)))
    rows = [
        PlannedCall(call, times, cost(call, devices, machine, policy))
        for call, times in counted.items()
    ]
    planned_layers = [attentions.planned(each, devices, machine) for each in layers]
    keys = _keys(rows, planned_layers, axes, names, backend_of(devices), work is None)
    found = members.planned(keys, devices, policy)
    ranks = _rank_classes(found, devices)

    def step_seconds(order: Mapping[str, int]) -> float:
        of = Devices(order, machine, per_process)
        in_layers = (attentions.planned(each, of, machine).seconds for each in layers)
        return seconds_of(of)(counted) + sum(in_layers)

    most = max((each.device_bytes.value for each in ranks), default=0)
    has_step = bool(counted or layers)
    said = [
        *warnings.of_memory(found, most, machine),
        *warnings.of_lanes(found, policy),
        *warnings.of_cycles(reader.beside, devices, policy),
        *warnings.of_axes(
            axes, devices, machine.domain, step_seconds if has_step else None
        ),
        *(each.warning for each in planned_layers if each.warning),
    ]
    return Plan(
        axes=axes,
        machine=machine,
        processes=devices.processes,
        communicators=tuple(found),
        calls=tuple(rows),
        attention=tuple(planned_layers),
        ranks=tuple(ranks),
        startup=startup(found, devices, machine),
        warnings=tuple(said),
        notes=(*notes, *sorted(reader.notes)),
    )


def _platform(mesh) -> str:
    """Return the name of a machine for the devices of a mesh, if it has devices."""
    if not isinstance(mesh, jax.sharding.Mesh):
        return "gpu"
    return "cpu" if mesh.devices.flat[0].platform == "cpu" else "gpu"


def _per_process(mesh, asked: int | None) -> tuple[int | None, tuple[str, ...]]:
    """Return devices per process, and what does not hold of the mesh's devices."""
    if asked is not None:
        if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
            raise ValueError(
                f"plan: devices_per_process must be at least 1, got {asked!r}"
            )
        return asked, ()
    if not isinstance(mesh, jax.sharding.Mesh):
        return None, ()
    of = np.array([device.process_index for device in mesh.devices.flat])
    width = int((of == of[0]).sum())
    if (of == of[0] + np.arange(len(of)) // width).all():
        return width, ()
    return width, (
        "the mesh's devices are not in the order of their processes; figures are for a "
        "mesh whose devices are",
    )


def _split(work, args) -> tuple[list[tuple], list[Attention]]:
    """Return the functions with their arguments, and the attention layers."""
    if work is None or isinstance(work, Attention):
        parts: Sequence = () if work is None else (work,)
        if args:
            raise TypeError(f"plan: {len(args)} arguments, but no function to trace")
    elif callable(work):
        parts = ((work, *args),)
    elif isinstance(work, list) and not args:
        parts = work
    else:
        parts = (None,)
    functions, layers = [], []
    for part in parts:
        if isinstance(part, Attention):
            layers.append(part)
        elif isinstance(part, tuple) and part and callable(part[0]):
            functions.append(part)
        else:
            raise TypeError(
                f"plan: work must be a function with its arguments, a "
                f"jaxcomm.planning.Attention, a list of (function, *args) and "
                f"Attention, or None; got {work!r}"
            )
    return functions, layers


def _keys(
    rows: Sequence[PlannedCall],
    layers: Sequence[PlannedAttention],
    axes: Mapping[str, int],
    lanes: Sequence[str],
    backend_of: Callable,
    is_alone: bool,
) -> dict[members.Key, bool]:
    """Return the communicators to make, and whether ranks send to all others."""
    found: dict[members.Key, bool] = {}

    def add(key, sends_to_all):
        found[key] = found.get(key, False) or sends_to_all

    for row in rows:
        call = row.call
        if call.is_ours:
            backend = backend_of(call.axes, call.index_groups, call.backend)
            key = members.Key(call.axes, call.index_groups, call.lane, backend)
            add(key, call.collective in _TO_ALL)
    for layer in layers:
        names = layer.asked.names
        key = members.Key(names, backend=backend_of(names, None, None))
        add(key, layer.plan.chosen in _STRATEGIES_TO_ALL)
    if is_alone:
        wanted = [(name,) for name in axes]
        wanted += [tuple(axes)] if len(axes) > 1 else []
        for over in wanted:
            for lane in lanes:
                chosen = backend_of(over, None, None)
                add(members.Key(over, lane=lane, backend=chosen), False)
    return found


def _rank_classes(
    found: Sequence[members.PlannedCommunicator], devices: Devices
) -> list[RankClass]:
    """Return the ranks by what they hold, most ranks first."""
    codes = np.zeros(devices.size, np.int64)
    for member in found:
        of_rank = devices.rank_codes(member.key.axes, member.key.index_groups)
        codes = codes * len(member.groups) + of_rank
        # Small numbers again: there may be many communicators.
        codes = np.unique(codes, return_inverse=True)[1] if len(found) > 8 else codes
    _, first, counts = np.unique(codes, return_index=True, return_counts=True)
    classes = []
    for device, count in sorted(zip(first, counts, strict=True)):
        held = NOTHING
        pinned, number = NOTHING, 0
        for member in found:
            of_rank = devices.rank_codes(member.key.axes, member.key.index_groups)
            code = of_rank[device]
            if member.groups[code].size > 1:
                held += member.by_class[code]
                pinned += member.pinned_bytes
                number += 1
        classes.append(RankClass(int(count), int(device), number, held, pinned))
    return sorted(classes, key=lambda each: -each.count)
