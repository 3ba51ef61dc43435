"""The tables at the end."""

import itertools
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from bench import attention, masks, roofline, units
from bench.rows import (
    GLOO,
    LAX,
    MPI4JAX,
    OURS,
    FailedRow,
    MemoryRow,
    ProcessesRow,
    Row,
    TimedRow,
)

_RIVALS_IN_ORDER = (OURS, GLOO, MPI4JAX)
_MARKS = {True: ("pass", "green"), False: ("miss", "red"), None: ("", "")}


# Narrower, the tables leave out the rate, which JSON has: 80 columns are enough.
_WIDTH_WITH_RATE = 106


def tables(rows: Sequence[Row], width: int) -> Iterator[RenderableType]:
    """Yield what to print: a table for each suite, then what failed.

    Args:
      rows: of any suites and kinds.
      width: columns of the terminal.
    """
    hidden = () if width >= _WIDTH_WITH_RATE else ("rate",)
    for suite in dict.fromkeys(row.suite for row in rows):
        of_suite = [row for row in rows if row.suite == suite]
        between = [row for row in of_suite if isinstance(row, ProcessesRow)]
        timed = [
            row
            for row in of_suite
            if isinstance(row, TimedRow) and not isinstance(row, ProcessesRow)
        ]
        held = [row for row in of_suite if isinstance(row, MemoryRow)]
        if timed and suite in (attention.SUITE, masks.SUITE):
            yield _by_variant(timed, hidden)
        elif timed:
            yield _side_by_side(timed, hidden)
        for count in dict.fromkeys(row.devices for row in between):
            yield _by_rival([row for row in between if row.devices == count], hidden)
        if held:
            yield _memory(held, hidden)
        for row in of_suite:
            if isinstance(row, FailedRow):
                where = f"{suite}: {row.name}, {row.devices} devices"
                yield Text(f"{where} failed. {row.error}", style="red")


class _Table:
    """A rich table that leaves some of its columns out."""

    def __init__(self, rows, columns, caption, hidden):
        self.table = Table(
            title=rows[0].suite,
            caption=caption,
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        self.shown = [name not in hidden for name in columns]
        for name, justify in columns.items():
            if name not in hidden:
                # Words may go below each other, numbers keep their unit.
                self.table.add_column(name, justify=justify, no_wrap=justify == "right")

    def add_row(self, *cells, end_section):
        shown = itertools.compress(cells, self.shown)
        self.table.add_row(*shown, end_section=end_section)


def _side_by_side(rows, hidden):
    columns = {
        "case": "left", "devices": "right", "per device": "right", OURS: "right",
        LAX: "right", "ratio": "right", "target": "right", "": "left",
        "rate": "right", "roofline": "right",
    }  # fmt: skip
    table = _Table(rows, columns, _caption(rows[0], f"ratio: {LAX} / {OURS}. "), hidden)
    for i, row in enumerate(rows):
        # A row without our variant is the floor, which has one time.
        lone = next(iter(row.seconds))
        ours = OURS if OURS in row.seconds else lone
        last = i + 1 == len(rows) or _group(rows[i + 1]) != _group(row)
        table.add_row(
            row.name,
            str(row.devices),
            units.size(row.payload_bytes),
            units.seconds(row.seconds[ours].median),
            units.seconds(row.seconds[LAX].median) if LAX in row.seconds else "",
            f"{row.ratios[LAX]:.2f}" if LAX in row.ratios else "",
            *_judged(row),
            units.rate(row.rates[ours], row.unit),
            units.percent(row.shares[ours]),
            end_section=last,
        )
    return table.table


def _by_variant(rows, hidden):
    columns = {
        "case": "left", "devices": "right", "variant": "left", "time": "right",
        "/ ours": "right", "rate": "right", "roofline": "right",
        "target": "right", "": "left",
    }  # fmt: skip
    caption = f"{rows[0].detail}. " + _caption(rows[0])
    table = _Table(rows, columns, caption, hidden)
    for row in rows:
        for name, spread in row.seconds.items():
            first = name == OURS
            table.add_row(
                row.name if first else "",
                str(row.devices) if first else "",
                name,
                units.seconds(spread.median),
                "" if first else f"{row.ratios[name]:.2f}",
                units.rate(row.rates[name], row.unit),
                units.percent(row.shares[name]),
                *(_judged(row) if first else ("", "")),
                end_section=name == list(row.seconds)[-1],
            )
    return table.table


def _by_rival(rows, hidden):
    columns = {
        "case": "left", "per process": "right", "variant": "left", "time": "right",
        "middle half": "right", "/ ours": "right", "target": "right", "": "left",
        "rate": "right", "memcpy": "right",
    }  # fmt: skip
    limits = sorted(row.roofline_rate for row in rows)
    caption = (
        f"{rows[0].devices} processes of one device each; the slowest counts. "
        f"{rows[0].detail}. memcpy: what all read and write at least, per second, as "
        f"part of {rows[0].roofline}, {units.rate(limits[len(limits) // 2], 'bytes')}."
    )
    # Mostly the same for every case.
    for why in dict.fromkeys(why for row in rows for why in row.absent.items()):
        caption += f"\n{why[0]}: {why[1]}."
    table = _Table(rows, columns, caption, hidden)
    table.table.title = f"{rows[0].suite} -n {rows[0].devices}"
    for row in rows:
        # Ours first, though it may be among the absent.
        variants = sorted({*row.seconds, *row.absent}, key=_RIVALS_IN_ORDER.index)
        for name in variants:
            first = name == variants[0]
            table.add_row(
                row.name if first else "",
                units.size(row.payload_bytes) if first else "",
                name,
                *_time_or_absence(row, name),
                f"{row.ratios[name]:.2f}" if name in row.ratios else "",
                str(row.targets.get(name, "")),
                _mark(row.is_met_by(name)),
                units.rate(row.rates[name], row.unit) if name in row.rates else "",
                units.percent(row.shares[name]) if name in row.shares else "",
                end_section=name == variants[-1],
            )
    return table.table


def _time_or_absence(row, name):
    if name not in row.seconds:
        return "not measured" if name == OURS else "absent", ""
    spread = row.seconds[name]
    between = f"{units.seconds(spread.lower)} - {units.seconds(spread.upper)}"
    return units.seconds(spread.median), between


def _memory(rows, hidden):
    columns = {
        "case": "left", "devices": "right", "variant": "left", "temporary": "right",
        "growth": "right", "target": "right", "": "left",
    }  # fmt: skip
    table = _Table(
        rows,
        columns,
        f"temp_size_in_bytes of one device's program, tokens per device equal "
        f"({rows[0].detail} on {rows[0].devices}); growth from the smallest ring.",
        hidden,
    )
    for row in rows:
        for name, held in row.temp_bytes.items():
            first = name == OURS
            table.add_row(
                row.name if first else "",
                str(row.devices) if first else "",
                name,
                units.size(held),
                units.percent(row.growth[name]) if name in row.growth else "",
                *(_judged(row) if first else ("", "")),
                end_section=name == list(row.temp_bytes)[-1],
            )
    return table.table


def _group(row):
    return row.devices, row.payload_bytes


def _judged(row):
    return str(row.target or ""), _mark(row.is_met)


def _mark(is_met):
    word, style = _MARKS[is_met]
    return Text(word, style=style)


def _caption(row, before=""):
    if row.unit == roofline.BYTES:
        what = "what all devices read and write at least"
    else:
        what = "the products of all devices"
    return f"{before}roofline: {what}, per second, as part of {row.roofline}."
