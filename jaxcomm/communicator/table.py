"""Communicators as a table, in a terminal and in a notebook."""

import dataclasses
import html
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from jaxcomm._built import ABSENCE
from jaxcomm.communicator import text_table
from jaxcomm.communicator.communicator import Communicator

_COLUMNS = (
    "mesh axes",
    "lane",
    "backend",
    "size",
    "groups",
    "calls",
    "bytes",
    "memory",
    "state",
)


# Below every table, since a faster backend may be had.
_REMARK = f"XLA communicates: {ABSENCE}" if ABSENCE else ""


@dataclasses.dataclass(frozen=True)
class Counters:
    """How many communicators this process made and ended.

    Attributes:
      created: made from nothing. NCCL makes only those of whole meshes so.
      split: split off those of whole meshes. ``CommPolicy(share=)`` says whether they
        have resources of their own.
      borrowed: XLA's, for the ``xla`` backend.
      destroyed: closed.
      live: there now.

    Example:
      >>> made = jaxcomm.init(mesh, "context")
      >>> before = jaxcomm.communicators().counters
      >>> made = jaxcomm.init(mesh, "context")
      >>> jaxcomm.communicators().counters == before
      True
    """

    created: int = 0
    split: int = 0
    borrowed: int = 0
    destroyed: int = 0
    live: int = 0


class Communicators(Sequence[Communicator]):
    """Communicators that print as a table, in a notebook as HTML.

    A line below the table says so if jaxcomm has no extension here.

    Attributes:
      counters: how many this process had made and closed when it made the table.
    """

    def __init__(self, members: Iterable[Communicator], counters: Counters):
        """Hold the communicators in the order given."""
        self._members = tuple(members)
        self.counters = counters

    @overload
    def __getitem__(self, index: int) -> Communicator: ...
    @overload
    def __getitem__(self, index: slice) -> "Communicators": ...
    def __getitem__(self, index):
        """Return one communicator, or a table of a slice of them."""
        if isinstance(index, slice):
            return Communicators(self._members[index], self.counters)
        return self._members[index]

    def __len__(self) -> int:
        """Count them."""
        return len(self._members)

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield one row of text for each communicator, under the columns' names."""
        for member in self._members:
            stats = member.stats()
            axes = " x ".join(member.axes)
            if member.index_groups is not None:
                axes += f" in {[list(group) for group in member.index_groups]}"
            yield (
                axes,
                member.lane,
                member.backend,
                str(member.size),
                str(len(member.groups)),
                str(sum(stats["calls"].values())) if member.is_ours else "in XLA",
                text_table.size(stats["bytes"]) if member.is_ours else "in XLA",
                text_table.size(stats["host_bytes"] + stats["device_bytes"]),
                "closed" if member.closed else "live",
            )

    def __str__(self) -> str:
        """Draw the table."""
        drawn = text_table.text(_COLUMNS, self.rows())
        return f"{drawn}\n{_REMARK}" if _REMARK else drawn

    __repr__ = __str__

    def _repr_html_(self) -> str:
        drawn = text_table.as_html(_COLUMNS, self.rows())
        return f"{drawn}<p>{html.escape(_REMARK)}</p>" if _REMARK else drawn
