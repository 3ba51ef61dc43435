"""The parameters that all collectives share, as one value."""

import dataclasses
import math
from typing import Any, Literal

from jaxcomm import compat
from jaxcomm.communicator.replica_groups import IndexGroups


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a collective, checked. Primitives carry it as their ``call``.

    Attributes:
      name: what the user called, for messages.
      axes: the axis names, in the order that numbers the ranks.
      index_groups: ``axis_index_groups`` as nested tuples, or None.
      given: how operands are typed over ``axes``: ``"varying"``, or ``"unreduced"``
        for terms of a sum that is still to be taken.
      to: how results are typed over ``axes``; ``"invarying"`` and ``"reduced"``
        results are equal on all ranks.
      lane: the lane to use. None for the default lane.
      backend: the backend to use. None for the one that lowering finds.
    """

    name: str
    axes: tuple[str, ...]
    index_groups: IndexGroups = None
    given: Literal["varying", "unreduced"] = "varying"
    to: Literal["varying", "invarying", "reduced"] = "varying"
    lane: str | None = None
    backend: str | None = None

    @property
    def where(self) -> str:
        """What messages call it, as ``psum over ('i',)``."""
        return f"{self.name} over {self.axes}"

    @property
    def invariant(self) -> bool:
        """Whether results are typed as equal on all ranks."""
        return self.to == "invarying"

    @property
    def axes_size(self) -> int:
        """The number of ranks along the axes."""
        return math.prod(compat.axis_size(axis) for axis in self.axes)

    @property
    def group_size(self) -> int:
        """The number of ranks of a group.

        Raises:
          ValueError: if groups differ in size.
        """
        if self.index_groups is None:
            return self.axes_size
        sizes = {len(group) for group in self.index_groups}
        if len(sizes) > 1:
            raise ValueError(
                f"axis_index_groups must all be of one size here, got "
                f"{self.index_groups}"
            )
        return sizes.pop()

    @property
    def result_size(self) -> int | None:
        """The group size, or None if groups differ in size."""
        groups = self.index_groups
        if groups is not None and len({len(group) for group in groups}) > 1:
            return None
        return self.group_size

    def replace(self, **changes: Any) -> "Call":
        """Return a copy with some attributes changed.

        >>> Call("psum", ("i",)).replace(lane="other").lane
        'other'
        """
        return dataclasses.replace(self, **changes)

    def plain(self, name: str) -> "Call":
        """Return a call of this package in place of this one, or as a part of it."""
        return self.replace(name=name, index_groups=None, given="varying", to="varying")
