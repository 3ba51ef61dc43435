"""What a plan holds: the values alone, which others print and compare."""

import dataclasses
from collections.abc import Mapping

from jaxcomm.machine import Machine
from jaxcomm.planning.attention import PlannedAttention
from jaxcomm.planning.calls import Call
from jaxcomm.planning.communicators import PlannedCommunicator
from jaxcomm.planning.cost import Cost
from jaxcomm.planning.figure import Figure, total
from jaxcomm.planning.startup import Startup


@dataclasses.dataclass(frozen=True)
class PlannedCall:
    """One collective of a step.

    Attributes:
      call: what is called, on what.
      times: how often in a step.
      cost: of one, in the group that takes longest.
    """

    call: Call
    times: int
    cost: Cost

    @property
    def seconds(self) -> Figure:
        """Of all of them."""
        return self.times * self.cost.seconds


@dataclasses.dataclass(frozen=True)
class RankClass:
    """Ranks that hold the same.

    Attributes:
      count: how many there are.
      example: the device of the first.
      communicators: that such a rank takes part in.
      device_bytes: of all of them, once used.
      pinned_bytes: page-locked memory of the host.
    """

    count: int
    example: int
    communicators: int
    device_bytes: Figure
    pinned_bytes: Figure


@dataclasses.dataclass(frozen=True)
class Contents:
    """All figures of a plan.

    Attributes:
      axes: sizes of the mesh's axes, by name.
      machine: whose numbers the figures are made of.
      processes: how many there are.
      communicators: in the order in which they are made.
      calls: the collectives of a step, each once.
      attention: the attention layers that were asked for.
      ranks: classes of ranks that hold the same, most ranks first.
      startup: messages and seconds until the communicators are there.
      warnings: what is bad about the plan.
      notes: what is not known of it.
    """

    axes: Mapping[str, int]
    machine: Machine
    processes: int
    communicators: tuple[PlannedCommunicator, ...]
    calls: tuple[PlannedCall, ...]
    attention: tuple[PlannedAttention, ...]
    ranks: tuple[RankClass, ...]
    startup: Startup
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def step_seconds(self) -> Figure:
        """Communication of a step, one collective after the other; no attention."""
        return total(row.seconds for row in self.calls)

    @property
    def device_bytes(self) -> Figure:
        """Device memory of communicators, of the rank that has most."""
        return max(
            (each.device_bytes for each in self.ranks), key=lambda each: each.value
        )
