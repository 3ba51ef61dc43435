"""What the doctor found, one row a fact."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


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
    """Lists what will not work."""
    return [
        f"{title}: {row.name}: {row.text}"
        for title, rows in sections.items()
        for row in rows
        if row.is_fine is False
    ]


def to_json(sections: Sections) -> dict[str, Any]:
    """Returns everything found, by section and name, and the problems."""
    found: dict[str, Any] = {
        title: {row.name: row.text if row.value is None else row.value for row in rows}
        for title, rows in sections.items()
    }
    return found | {"problems": problems(sections)}
