""":func:`jaxcomm.plan`: what a layout costs, before there is a device."""

import dataclasses
import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxcomm._built import ABSENCE
from jaxcomm.communicator import text_table as table
from jaxcomm.communicator.lane import DEFAULT_LANE, check_lane
from jaxcomm.communicator.policy import CommPolicy, row_mover
from jaxcomm.machine import Machine
from jaxcomm.planning import communicators as members
from jaxcomm.planning import warnings
from jaxcomm.planning.calls import SENDS_TO_ALL, PlannedCall, TracedCall, sent_bytes
from jaxcomm.planning.communicators import Devices, PlannedCommunicator, axes_of
from jaxcomm.planning.trace import Reader
from jaxcomm.primitives import arguments

_COMMUNICATORS = (
    *("mesh axes", "lane", "backend", "groups", "domains", "buffers", "device memory"),
    *("shared memory", "peers"),
)
_CALLS = (
    *("collective", "mesh axes", "lane", "transport", "domains", "operands", "bytes"),
    *("sends", "times"),
)
_SOURCES = "Device memory: as measured on H200s, scaled by formula. Bytes: by formula"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a layout costs; prints as tables, in a notebook as HTML.

    Attributes:
      axes: sizes of the mesh's axes, by name.
      machine: whose numbers the figures are made of.
      processes: how many there are.
      communicators: in the order in which they are made.
      calls: the collectives of a step, each once.
      warnings: what is bad about the plan.
      notes: what is not known of it.

    Example:
      >>> made = jaxcomm.plan({"data": 2, "context": 4}, machine="h200")
      >>> len(made.communicators), made.device_bytes >> 20
      (3, 1131)
      >>> made.to_json()["communicators"][0]["axes"]
      ('data',)
    """

    axes: Mapping[str, int]
    machine: Machine
    processes: int
    communicators: tuple[PlannedCommunicator, ...]
    calls: tuple[PlannedCall, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def device_bytes(self) -> int:
        """Device memory of all communicators, of a rank with most of each."""
        return sum(each.device_bytes for each in self.communicators)

    @property
    def step_bytes(self) -> float:
        """Bytes that the busiest rank sends in a step."""
        return sum(row.times * row.sent_bytes for row in self.calls)

    def to_json(self) -> dict[str, Any]:
        """Return it in types that :mod:`json` writes."""
        return dataclasses.asdict(self) | {
            "device_bytes": self.device_bytes,
            "step_bytes": self.step_bytes,
        }

    def __str__(self) -> str:
        """Draw the tables."""
        lines = [self._heading()]
        for title, columns, rows in self._tables():
            lines += ["", title, table.text(columns, rows)]
        return "\n".join([*lines, "", *self._facts()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [f"<p>{html.escape(self._heading())}</p>"]
        for title, columns, rows in self._tables():
            parts.append(f"<p>{html.escape(title)}</p>{table.as_html(columns, rows)}")
        parts += [f"<p>{html.escape(fact)}</p>" for fact in self._facts()]
        return "".join(parts)

    def _heading(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.axes.items())
        devices = math.prod(self.axes.values())
        return (
            f"{axes}: {devices} devices, {self.processes} processes, domains of "
            f"{self.machine.domain} ({self.machine.source})"
        )

    def _tables(self) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
        if self.communicators:
            rows = [_of_communicator(each) for each in self.communicators]
            yield "communicators, as the rank with most sees them", _COMMUNICATORS, rows
        if self.calls:
            rows = [_of_call(row) for row in self.calls]
            yield "collectives of a step, on one rank", _CALLS, rows

    def _facts(self) -> Iterator[str]:
        if self.calls:
            yield f"a rank sends {table.size(self.step_bytes)} a step"
        if self.communicators:
            yield f"communicators take {_size(self.device_bytes)} of device memory"
        yield from (f"warning: {each}" for each in self.warnings)
        yield from (f"note: {each}" for each in self.notes)
        yield _SOURCES


def _of_communicator(each: PlannedCommunicator) -> tuple[str, ...]:
    return (
        _axes(each.axes, each.index_groups),
        each.lane,
        each.backend,
        ", ".join(f"{of.count} of {of.size}" for of in each.groups),
        str(each.domains),
        ("shared" if each.shares else "own") if each.backend == "nccl" else "-",
        *map(_size, (each.device_bytes, each.shared_bytes)),
        str(each.peers),
    )


def _of_call(row: PlannedCall) -> tuple[str, ...]:
    call = row.call
    return (
        call.name,
        _axes(call.axes, call.index_groups),
        call.lane,
        row.transport,
        str(row.domains),
        call.operands,
        table.size(call.bytes),
        table.size(row.sent_bytes),
        str(row.times),
    )


def _axes(axes, index_groups) -> str:
    text = " x ".join(axes)
    return text if index_groups is None else f"{text} in {len(index_groups)} parts"


def _size(count: int) -> str:
    return table.size(count) if count else "0"


def plan(
    mesh: Any,
    program: Callable | None = None,
    *args: Any,
    machine: str | Machine | None = None,
    policy: CommPolicy | None = None,
    lanes: str | Sequence[str] = (DEFAULT_LANE,),
    backend: str | None = None,
    devices_per_process: int | None = None,
) -> Plan:
    """Say what a program sends, and what its communicators take, without any device.

    Nothing runs: the program is traced, and JAX starts no backend. Devices are numbered
    in row-major order of the mesh's axes, host by host. So the last axis lies within a
    domain of fast links if it fits.

    Args:
      mesh: a dictionary of axis sizes, a ``jax.sharding.Mesh`` or an ``AbstractMesh``.
      program: holds a ``jax.shard_map``, with ``args`` as global arrays; or is what one
        device does with its own ``args``, under the mesh's axis names. If None, the
        communicators alone are planned, as :func:`jaxcomm.init` makes them.
      *args: of the program, arrays or ``jax.ShapeDtypeStruct``.
      machine: a name, ``"h100"``, ``"h200"``, ``"gb200"`` or ``"cpu"``, or a
        :class:`jaxcomm.Machine`. If None, ``"cpu"`` for a mesh of CPU devices, else an
        H200.
      policy: how NCCL makes communicators. If None, ``CommPolicy()``.
      lanes: of the communicators, if there is no program.
      backend: as for :func:`jaxcomm.init`. If None, ``"nccl"`` for GPUs, ``"host"`` for
        CPU devices of one host.
      devices_per_process: If None, all devices of a host.

    Returns:
      A :class:`~jaxcomm.planning.plan.Plan`, which prints as a table.

    Raises:
      TypeError: if mesh is no mesh, or program no function.
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
    machine = Machine.named(_platform(mesh) if machine is None else machine)
    policy = CommPolicy() if policy is None else policy
    if not isinstance(policy, CommPolicy):
        raise TypeError(f"plan: policy must be a jaxcomm.CommPolicy, got {policy!r}")
    names = (lanes,) if isinstance(lanes, str) else tuple(lanes)
    for name in names:
        check_lane(name, "plan: lane")
    if program is None and args:
        raise TypeError(f"plan: {len(args)} arguments, but no function to trace")
    if program is not None and not callable(program):
        raise TypeError(
            f"plan: program must be a function, its arguments after it, or None; got "
            f"{program!r}"
        )
    per_process, notes = _per_process(mesh, devices_per_process)
    if ABSENCE and isinstance(mesh, jax.sharding.Mesh):
        with_it = f"figures are for jaxcomm with its extension: {ABSENCE}"
        notes = (*notes, f"XLA communicates on this mesh, and {with_it}")
    devices = Devices(axes, machine, per_process)

    def backend_of(over, index_groups, asked):
        groups = devices.groups(over, index_groups)
        return members.backend_of(backend if asked is None else asked, machine, groups)

    def row_mover_of(over, index_groups):
        groups = devices.groups(over, index_groups)
        size, hosts = (
            max(getattr(each, of) for each in groups) for of in ("size", "hosts")
        )
        return row_mover(policy, size, devices.processes, hosts)

    reader = Reader(axes, machine.platform, backend_of, row_mover_of)
    counted = {} if program is None else reader.read(program, args)
    rows = [_planned(call, times, devices, policy) for call, times in counted.items()]
    keys: dict[members.Key, bool] = _keys_of(rows)
    if program is None:
        wanted = [(name,) for name in axes] + [tuple(axes)] * (len(axes) > 1)
        keys = {
            (over, None, lane, backend_of(over, None, None)): False
            for over in wanted
            for lane in names
        }
    found = members.planned(keys, devices, policy)

    def crossing_bytes(order: Mapping[str, int]) -> float:
        of = Devices(order, machine, per_process)
        each = (_planned(*item, of, policy) for item in counted.items())
        return sum(row.times * row.sent_bytes for row in each if row.domains > 1)

    said = [
        *warnings.of_memory(found, machine),
        *warnings.of_lanes(found, policy),
        *warnings.of_cycles(reader.beside, devices, policy),
        *warnings.of_axes(axes, machine, crossing_bytes if counted else None),
    ]
    return Plan(
        axes=axes,
        machine=machine,
        processes=devices.processes,
        communicators=tuple(found),
        calls=tuple(rows),
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
        asked = arguments.integer(asked, "plan: devices_per_process")
        if asked < 1:
            raise ValueError(
                f"plan: devices_per_process must be at least 1, got {asked}"
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


def _planned(
    call: TracedCall, times: int, devices: Devices, policy: CommPolicy
) -> PlannedCall:
    groups = [
        each for each in devices.groups(call.axes, call.index_groups) if each.size > 1
    ]
    transport = call.backend
    if call.backend == "host":
        is_one = all(each.processes == 1 for each in groups)
        transport = "memory" if is_one else "shared memory"
    return PlannedCall(
        call,
        times,
        transport,
        domains=max(each.domains for each in groups),
        sent_bytes=max(
            sent_bytes(call.collective, each.size, call.travelling_bytes)
            for each in groups
        ),
    )


def _keys_of(rows: Sequence[PlannedCall]) -> dict[members.Key, bool]:
    """Return the communicators of calls, and whether ranks send to all others."""
    found: dict[members.Key, bool] = {}
    for call in (row.call for row in rows if row.call.is_ours):
        key = call.axes, call.index_groups, call.lane, call.backend
        found[key] = found.get(key, False) or call.collective in SENDS_TO_ALL
    return found
