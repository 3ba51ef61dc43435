"""What the doctor found, one row a fact: as text and as JSON."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxcomm.communicator import text_table as table

_MARKS = {True: "ok", False: "problem", None: ""}


@dataclasses.dataclass(frozen=True)
class Row:
    """One fact.

    Attributes:
      name: what was looked at.
      text: what was found, for people.
      value: the same in types that json writes. If None, the text.
      is_fine: False if something will not work, with the reason in ``text``. None if
        the fact is neither good nor bad.
    """

    name: str
    text: str
    value: Any = None
    is_fine: bool | None = None


# Rows by the title of their section.
Sections = Mapping[str, Sequence[Row]]


def problems(sections: Sections) -> list[str]:
    """List what will not work."""
    return [
        f"{title}: {row.name}: {row.text}"
        for title, rows in sections.items()
        for row in rows
        if row.is_fine is False
    ]


def to_json(sections: Sections) -> dict[str, Any]:
    """Return everything found, by section and name, and the problems."""
    found: dict[str, Any] = {
        title: {row.name: row.text if row.value is None else row.value for row in rows}
        for title, rows in sections.items()
    }
    return found | {"problems": problems(sections)}


def text(sections: Sections) -> str:
    """Draw everything, and what will not work once more at the end.

    >>> print(text({"versions": [Row("jax", "0.10.2", is_fine=True)]}))
    versions
      jax  ok  0.10.2
    <BLANKLINE>
    no problem was found
    """
    lines = []
    for title, rows in sections.items():
        lines.append(title)
        cells = [
            ("" if at else row.name, "" if at else _MARKS[row.is_fine], line)
            for row in rows
            for at, line in enumerate(row.text.split("\n"))
        ]
        # Without the head and its rule: the section's title says enough.
        body = table.text(("", "", ""), cells).splitlines()[2:]
        lines += [f"  {line}" for line in body]
        lines.append("")
    found = [f"problem: {problem}" for problem in problems(sections)]
    return "\n".join([*lines, *(found or ["no problem was found"])])
