"""What the doctor found: plain, or on a terminal with rich where it is installed."""

import importlib.util
import sys

from jaxcomm.diagnostics import table
from jaxcomm.doctor.rows import Sections, problems

_MARKS = {True: "ok", False: "problem", None: ""}
_STYLES = {True: "green", False: "bold red", None: ""}


def show(sections: Sections) -> None:
    """Prints everything, and what will not work once more at the end."""
    # rich fills a table's lines with blanks, which only a terminal does not show.
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        print(text(sections))
    else:
        _show_with_rich(sections)


def text(sections: Sections) -> str:
    """Draws everything without colours.

    >>> from jaxcomm.doctor.rows import Row
    >>> print(text({"versions": [Row("jax", "0.10.2", is_fine=True)]}))
    versions
      jax  ok  0.10.2
    <BLANKLINE>
    no problem was found
    """
    lines = []
    for title, rows in sections.items():
        lines.append(title)
        cells = [(row.name, _MARKS[row.is_fine], row.text) for row in rows]
        # Without the head and its rule: the section's title says enough.
        body = table.text(("", "", ""), cells).splitlines()[2:]
        lines += [f"  {line}" for line in body]
        lines.append("")
    return "\n".join([*lines, *_conclusion(sections)])


def _conclusion(sections):
    found = problems(sections)
    return [f"problem: {problem}" for problem in found] or ["no problem was found"]


def _show_with_rich(sections):
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    for _ in range(3):
        drawn.add_column(overflow="fold")
    for title, rows in sections.items():
        drawn.add_row(Text(title, style="bold"))
        for number, row in enumerate(rows, 1):
            mark = Text(_MARKS[row.is_fine], style=_STYLES[row.is_fine])
            drawn.add_row(
                Text(f"  {row.name}"),
                mark,
                Text(row.text),
                end_section=number == len(rows),
            )
    console.print(drawn)
    for line in _conclusion(sections):
        style = "green" if line.startswith("no ") else "red"
        console.print(Text(line, style=style))
