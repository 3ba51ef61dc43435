"""The tables at the end."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from bench import units
from bench.gpu.rows import Figure, Finding

_MARKS = {True: ("yes", "green"), False: ("NO", "red"), None: ("", "")}


def tables(rows: Sequence[Figure | Finding]) -> Iterator[Table]:
    """Yields what was found, then what was compared, as far as there is any."""
    found = [row for row in rows if isinstance(row, Finding)]
    compared = [row for row in rows if isinstance(row, Figure)]
    if found:
        table = _table("found", right="left")
        for row in found:
            # Not markup: types are in brackets.
            table.add_row(Text(row.name), Text(row.found), _mark(row.is_right))
        yield table
    if compared:
        table = _table(
            "jaxcomm", against="left", theirs="right", ratio="right", asked="right",
            met="left",
        )  # fmt: skip
        for row in compared:
            table.add_row(
                row.name,
                units.seconds(row.ours),
                row.peer,
                units.seconds(row.theirs),
                f"{row.ratio:.2f}",
                "" if row.least is None else f">= {row.least:.2f}",
                _mark(row.is_met),
            )
        yield table


def _table(second, **columns):
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("what")
    table.add_column(second)
    for name, justify in columns.items():
        table.add_column(name, justify=justify)
    return table


def _mark(is_met):
    word, style = _MARKS[is_met]
    return Text(word, style=style)
