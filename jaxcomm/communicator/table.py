"""Communicators as a table, in a terminal and in a notebook."""

import html
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

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


class Communicators(Sequence[Communicator]):
    """Communicators that print as a table, in a notebook as HTML."""

    def __init__(self, members: Iterable[Communicator]):
        """Holds the communicators in the order given."""
        self._members = tuple(members)

    @overload
    def __getitem__(self, index: int) -> Communicator: ...
    @overload
    def __getitem__(self, index: slice) -> "Communicators": ...
    def __getitem__(self, index):
        """Returns one communicator, or a table of a slice of them."""
        if isinstance(index, slice):
            return Communicators(self._members[index])
        return self._members[index]

    def __len__(self) -> int:
        """Counts them."""
        return len(self._members)

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yields one row of text for each communicator, under the columns' names."""
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
                bytes_text(stats["bytes"]) if member.is_ours else "in XLA",
                bytes_text(stats["host_bytes"] + stats["device_bytes"]),
                "closed"
                if member.closed
                else "suspended"
                if stats["is_suspended"]
                else "live",
            )

    def __str__(self) -> str:
        """Draws the table."""
        rows = [_COLUMNS, *self.rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
        lines = [
            "  ".join(
                cell.ljust(width) for cell, width in zip(row, widths, strict=True)
            )
            for row in rows
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def row(cells, tag):
            inner = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
            return f"<tr>{inner}</tr>"

        body = "".join(row(cells, "td") for cells in self.rows())
        head = row(_COLUMNS, "th")
        return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def bytes_text(count: float) -> str:
    """Returns a number of bytes as people read it: ``"2.9 kB"``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
