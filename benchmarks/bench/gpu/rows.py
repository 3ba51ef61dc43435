"""What the parts of ``bench gpu`` give, ready for a table or for JSON."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from bench import units


@dataclasses.dataclass(frozen=True)
class Figure:
    """One comparison.

    Attributes:
      name: what was done.
      ours: seconds a call, the median.
      peer: what it is compared with.
      theirs: its seconds.
      ratio: of theirs to ours, the median over rounds.
      least: what is demanded of the ratio, None if nothing.
      note: what else is to be said, in words.
    """

    kind: ClassVar[str] = "figure"
    name: str
    ours: float
    peer: str
    theirs: float
    ratio: float
    least: float | None = None
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether what is demanded was reached, None if nothing is."""
        return None if self.least is None else self.ratio >= self.least

    def __str__(self) -> str:
        """Says it in one line."""
        asked = "" if self.least is None else f", asked {self.least:.2f}"
        note = f"; {self.note}" if self.note else ""
        ours, theirs = units.seconds(self.ours), units.seconds(self.theirs)
        compared = f"{self.name}: {ours}; {self.peer}: {theirs}"
        return f"{compared}; ratio {self.ratio:.2f}{asked}{note}"


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that was looked at.

    Attributes:
      name: what.
      found: how it is, in words.
      is_right: whether it is as it must be, None if there is no must.
      values: the numbers in it, by name.
    """

    kind: ClassVar[str] = "finding"
    name: str
    found: str
    is_right: bool | None = None
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def is_met(self) -> bool | None:
        """Whether it is as it must be, None if there is no must."""
        return self.is_right

    def __str__(self) -> str:
        """Says it in one line."""
        return f"{'WRONG: ' if self.is_right is False else ''}{self.name}: {self.found}"


def to_json(part: str, row: Figure | Finding) -> dict:
    """Returns a row of a part in types that the json module writes."""
    fields = dataclasses.asdict(row)
    return {"part": part, "kind": row.kind, "met": row.is_met, **fields}
