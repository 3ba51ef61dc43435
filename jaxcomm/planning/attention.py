"""Attention over split sequences, as a part of a plan."""

import dataclasses

from jaxcomm.attention.layout import Layout
from jaxcomm.attention.plan import Plan
from jaxcomm.attention.plan import plan as attention_plan
from jaxcomm.communicator.replica_groups import canonical_axes
from jaxcomm.diagnostics import table
from jaxcomm.machine import Machine
from jaxcomm.planning.groups import Devices

# Another schedule is worth a word from here on.
_BETTER = 0.95


@dataclasses.dataclass(frozen=True)
class Attention:
    """Attention layers of a step, for :func:`jaxcomm.plan`.

    Attributes:
      axes: mesh axis, or tuple of axes, that splits the sequence.
      tokens: of the whole sequence.
      heads: query heads.
      head_size: of queries and keys.
      key_heads: heads of keys and values. If None, as many as of queries.
      value_size: head size of values. If None, that of keys.
      batch: sequences of a rank.
      dtype: of the arrays.
      schedule: ``"contiguous"``, ``"zigzag"`` or ``"striped"``.
      is_causal: as in ``jaxcomm.ring_attention``.
      local_window_size: as in ``jaxcomm.ring_attention``.
      times: layers of a step.

    Example:
      >>> layers = jaxcomm.planning.Attention(
      ...     "context", tokens=131072, heads=32, key_heads=8, head_size=128, times=32
      ... )
      >>> made = jaxcomm.plan({"data": 2, "context": 4}, layers, machine="h200")
      >>> made.attention[0].plan.chosen
      'ring'
    """

    axes: str | tuple[str, ...]
    tokens: int
    heads: int
    head_size: int
    key_heads: int | None = None
    value_size: int | None = None
    batch: int = 1
    dtype: str = "bfloat16"
    schedule: str = "zigzag"
    is_causal: bool = True
    local_window_size: int | tuple[int, int] | None = None
    times: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        """The axes as a tuple."""
        return canonical_axes(self.axes)


@dataclasses.dataclass(frozen=True)
class PlannedAttention:
    """What attention layers cost.

    Attributes:
      asked: the layers.
      plan: every strategy, and which is chosen.
      crosses: whether groups span several domains, so that hops take the network.
      warning: what would be better, or None.
    """

    asked: Attention
    plan: Plan
    crosses: bool
    warning: str | None

    @property
    def seconds(self) -> float:
        """Of both passes of all layers, by the chosen strategy."""
        return self.asked.times * self.plan.rows[self.plan.chosen].seconds


def planned(asked: Attention, devices: Devices, machine: Machine) -> PlannedAttention:
    """Return what attention layers cost on a mesh."""
    groups = devices.groups(asked.names)
    crosses = any(each.domains > 1 for each in groups)
    links = machine.over_network() if crosses else machine
    found = _plan(asked, asked.schedule, devices, links)
    return PlannedAttention(
        asked, found, crosses, _window_warning(asked, found, devices, links)
    )


def _plan(asked: Attention, schedule: str, devices: Devices, links: Machine) -> Plan:
    size = devices.extent(asked.names)
    return attention_plan(
        Layout(schedule, size, asked.tokens),
        heads=asked.heads,
        key_heads=asked.key_heads,
        head_size=asked.head_size,
        value_size=asked.value_size,
        batch=asked.batch,
        dtype=asked.dtype,
        is_causal=asked.is_causal,
        local_window_size=asked.local_window_size,
        axis_sizes=tuple(devices.extent((axis,)) for axis in asked.names),
        machine=links,
    )


def _window_warning(asked, found: Plan, devices, links) -> str | None:
    if asked.local_window_size is None or asked.schedule == "contiguous":
        return None
    other = _plan(asked, "contiguous", devices, links)
    mine, theirs = found.rows[found.chosen], other.rows[other.chosen]
    if theirs.seconds > _BETTER * mine.seconds:
        return None
    sent = table.size(mine.forward_bytes), table.size(theirs.forward_bytes)
    return (
        f"attention over {asked.axes!r} has a window of {asked.local_window_size}: "
        f"schedule='contiguous' sends a border to the next rank, by strategy "
        f"{other.chosen!r} {sent[1]} a layer and {table.duration(theirs.seconds)}. "
        f"{asked.schedule!r} sends {sent[0]} and takes {table.duration(mine.seconds)}"
    )
