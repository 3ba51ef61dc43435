"""What is bad about a plan."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from jaxcomm import config
from jaxcomm.communicator import text_table as table
from jaxcomm.communicator.lane import DEFAULT_LANE
from jaxcomm.communicator.policy import CommPolicy
from jaxcomm.machine import Machine
from jaxcomm.planning.calls import TracedCall
from jaxcomm.planning.communicators import Devices, PlannedCommunicator

# Of a device's memory: models of today leave no more.
_MUCH = 0.1
# An order of axes is worth a word from here on.
_BETTER = 0.99


def of_memory(
    communicators: Sequence[PlannedCommunicator], machine: Machine
) -> Iterator[str]:
    """Warn of communicators that do not fit, or take much."""
    bound = config.max_communicators()
    if len(communicators) > bound:
        yield (
            f"{len(communicators)} communicators are more than the {bound} that "
            f"JAXCOMM_MAX_COMMUNICATORS allows"
        )
    device_bytes = sum(each.device_bytes for each in communicators)
    if not machine.memory or device_bytes <= _MUCH * machine.memory:
        return
    own = sum(not each.shares for each in communicators)
    verb = "do not fit into" if device_bytes > machine.memory else "take much of"
    advice = "CommPolicy(max_ctas=8) takes a quarter of the buffers"
    if own:
        advice = f"{own} have buffers of their own: CommPolicy(share=True); " + advice
    yield (
        f"the communicators' {table.size(device_bytes)} {verb} the "
        f"{table.size(machine.memory)} of a device. {advice}"
    )


def of_lanes(
    communicators: Sequence[PlannedCommunicator], policy: CommPolicy
) -> Iterator[str]:
    """Warn of more lanes than the policy allows."""
    lanes: dict[tuple, set[str]] = {}
    for each in communicators:
        if each.backend == "nccl":
            lanes.setdefault((each.axes, each.index_groups), set()).add(each.lane)
    for (axes, _), names in lanes.items():
        if len(names) > policy.lanes:
            yield (
                f"axes {axes} have lanes {sorted(names)}, more than "
                f"CommPolicy(lanes={policy.lanes}) allows: init would raise"
            )


def of_cycles(
    beside: set[tuple[TracedCall, TracedCall]], devices: Devices, policy: CommPolicy
) -> Iterator[str]:
    """Warn of collectives that could wait for each other in a circle.

    Two operations that may run at the same time, on different communicators whose
    groups have devices in common: where device 0 launches one first, and device 1 the
    other, both wait for good if their kernels do not fit side by side. NCCL's guide
    calls for one order on all devices; XLA does not overlap collectives that share more
    than one device (xla PR 47467).
    """
    told = set()
    for pair in sorted(beside, key=repr):
        one, other = pair
        if not (one.is_split or other.is_split) or _channel(one) == _channel(other):
            continue
        if {one.backend, other.backend} - {"nccl", "xla"}:
            continue  # the host backend waits for nobody in order
        if all(_is_shared(each, policy) for each in pair):
            continue  # NCCL runs them one after the other
        common = set(one.axes) & set(other.axes)
        together = math.prod(devices.extent((axis,)) for axis in common)
        if together > 1:
            share = f"share {together} devices of each group"
        elif one.axes != other.axes:
            share = "cross in one device of each group"
        else:
            continue
        key = frozenset(map(_channel, pair))
        if key in told:
            continue
        told.add(key)
        yield (
            f"{_named(one)} and {_named(other)} do not depend on each other and "
            f"{share}: devices that launch them in different orders could wait in a "
            f"circle. Make one depend on the other, use one lane, or set "
            f"NCCL_LAUNCH_ORDER_IMPLICIT=1 before NCCL loads"
        )


def of_axes(
    axes: Mapping[str, int],
    machine: Machine,
    crossing_bytes: Callable[[Mapping[str, int]], float] | None,
) -> Iterator[str]:
    """Warn of axes in an order that has them cross domains in vain.

    Args:
      axes: sizes by name, in the mesh's order.
      machine: whose domains they cross.
      crossing_bytes: what a rank sends in a step in groups that span domains, with the
        axes in another order; None if there is no step.
    """
    devices = Devices(axes, machine, None)
    last = next((name for name in reversed(list(axes)) if axes[name] > 1), None)
    crossing = [
        name
        for name, size in axes.items()
        if 1 < size <= machine.domain
        and name != last
        and any(each.domains > 1 for each in devices.groups((name,)))
    ]
    if not crossing:
        return
    if crossing_bytes is None:
        yield (
            f"axes {crossing} cross domains of {machine.domain} devices and would fit "
            f"into one: the last axis of a mesh lies within a domain. Put the axis "
            f"that sends most there"
        )
        return
    now = crossing_bytes(axes)
    for name in crossing:
        order = {key: size for key, size in axes.items() if key != name}
        order[name] = axes[name]
        then = crossing_bytes(order)
        if then < _BETTER * now:
            yield (
                f"axis {name!r} crosses domains and need not: in the order "
                f"{tuple(order)} a rank sends {table.size(then)} a step in groups that "
                f"span domains, and not {table.size(now)}"
            )


def _channel(call: TracedCall) -> tuple:
    return call.axes, call.index_groups, call.lane, call.backend


def _is_shared(call: TracedCall, policy: CommPolicy) -> bool:
    return call.backend == "nccl" and policy.shares(call.lane == DEFAULT_LANE)


def _named(call: TracedCall) -> str:
    lane = "" if call.lane == DEFAULT_LANE else f" (lane {call.lane!r})"
    return f"{call.name} over {call.axes}{lane}"
