"""Rows as text for a terminal and as HTML for a notebook."""

import html
import time
from collections.abc import Iterable, Sequence


def text(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Draw a table with a rule under its head.

    >>> print(text(("rank", "state"), [("0", "started")]))
    rank  state
    ----  -------
    0     started
    """
    cells = [tuple(columns), *map(tuple, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    cells.insert(1, tuple("-" * width for width in widths))
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def as_html(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table element.

    >>> "<tr><td>&lt;b&gt;</td></tr>" in as_html(("lane",), [("<b>",)])
    True
    """

    def row(cells: Iterable[str], tag: str) -> str:
        inner = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
        return f"<tr>{inner}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f"<table><thead>{row(columns, 'th')}</thead><tbody>{body}</tbody></table>"


def plain(text: str) -> str:
    r"""Return a text with escapes for what a terminal would act on, line ends too.

    >>> print(plain("red is \x1b[31m"))
    red is \x1b[31m
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode()
        for each in text
    )


def size(count: float) -> str:
    """Return a number of bytes in powers of 1024, three digits.

    >>> size(16), size(1 << 20), size(3 << 39)
    ('16 B', '1 MiB', '1.5 TiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{digits(count)} {unit}"
        count /= 1024
    return f"{digits(count)} TiB"


def digits(value: float) -> str:
    """Return a number with three digits, or all of a larger integer part.

    >>> digits(0.1234), digits(12), digits(1234.5)
    ('0.123', '12', '1234')
    """
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return a time with its unit, three digits.

    >>> duration(52.1e-6), duration(0.0012), duration(12.34), duration(600)
    ('52.1 us', '1.2 ms', '12.3 s', '600 s')
    """
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{digits(seconds * factor)} {unit}"
    return f"{digits(seconds)} s"


def clock(unix_seconds: float) -> str:
    """Return the time of day, with milliseconds."""
    thousandths = round(unix_seconds * 1000)
    whole = time.strftime("%H:%M:%S", time.localtime(thousandths // 1000))
    return f"{whole}.{thousandths % 1000:03d}"


def numbers(values: Iterable[int]) -> str:
    """List numbers, runs of three and more as a range.

    >>> numbers([0, 1, 2, 3, 7, 9, 8, 20])
    '0-3, 7-9, 20'
    """
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
        for run in runs
    )
