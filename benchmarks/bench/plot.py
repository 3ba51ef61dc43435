"""Pictures: lines over size for collectives, bars for everything else."""

from collections.abc import Sequence
from typing import Any

import matplotlib

# Works without a display, and leaves the backend of a notebook alone elsewhere.
matplotlib.use("agg")

import matplotlib.figure

from bench import bandwidth, collectives, lines, units
from bench.colors import LOST
from bench.colors import of as color_of
from bench.rows import MemoryRow, Row, TimedRow, is_slower
from bench.targets import MIB

# Of a plot of bars, and of a figure: letters can be read on a page of 390 pixels.
_BAR_HEIGHT, _WIDTH = 1.7, 5.6


def supports(path: str) -> bool:
    """Return whether the name's ending is a format that can be written."""
    known = matplotlib.figure.Figure().canvas.get_supported_filetypes()
    return path.rpartition(".")[2].lower() in known


def panels(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Return the rows of each panel, by its name.

    Collectives have a panel for each number of devices, other suites have one. Failed
    rows are left out.
    """
    found: dict[str, list[Any]] = {}
    for row in rows:
        if _is_line(row):
            found.setdefault(f"{row.suite}-{row.devices}", []).append(row)
        elif isinstance(row, TimedRow | MemoryRow):
            found.setdefault(row.suite, []).append(row)
    return found


def save(path: str, rows: Sequence[Row], title: str, caption: str = "") -> None:
    """Draw one panel below the other.

    Args:
      path: where to; the ending says which format.
      rows: of any suites.
      title: says on which machine.
      caption: stands below, in small letters.
    """
    parts = panels(rows)
    sizes = [_size(of_panel) for of_panel in parts.values()]
    # Above, the titles; below, the caption.
    heights = [height + 0.5 for _, height in sizes]
    room = 0.5 + 0.2 * len(caption.splitlines())
    width = max([_WIDTH, *(width for width, _ in sizes)])
    inches = width, sum(heights) + room
    figure = matplotlib.figure.Figure(inches, layout="constrained")
    figure.suptitle(title, fontsize="medium")
    if caption:
        figure.supxlabel(caption, fontsize="x-small", x=0.01, ha="left")
    if parts:
        below = figure.subfigures(len(parts), 1, height_ratios=heights, squeeze=False)
        for part, (name, of_panel) in zip(below[:, 0], parts.items(), strict=True):
            if len(parts) > 1:
                part.suptitle(name, fontweight="bold")
            (lines.draw if _is_line(of_panel[0]) else _bars)(part, of_panel)
    figure.savefig(path, dpi=120, metadata=_without_date(path))


def _is_line(row):
    if not isinstance(row, TimedRow):
        return False
    return row.name == collectives.FLOOR or bandwidth.factor(row) is not None


def _size(rows):
    """Return the inches that a panel needs, across and down."""
    if _is_line(rows[0]):
        return lines.size(rows)
    return _WIDTH, _BAR_HEIGHT * len(rows)


def _without_date(path):
    # The same rows give the same file.
    return {"Date": None} if path.lower().endswith(".svg") else None


def _bars(figure, rows):
    axes = figure.subplots(len(rows), 1, squeeze=False)
    for ax, row in zip(axes.flat, rows, strict=True):
        if isinstance(row, MemoryRow):
            values = {name: held / MIB for name, held in row.temp_bytes.items()}
            texts = [units.size(held) for held in row.temp_bytes.values()]
            label, spread = "temporary memory of a device [MiB]", None
        else:
            values = {name: of.median * 1e3 for name, of in row.seconds.items()}
            texts = [_time(row, name) for name in row.seconds]
            label = "time of a call [ms], fastest to slowest"
            below = [(of.median - of.min) * 1e3 for of in row.seconds.values()]
            above = [(of.max - of.median) * 1e3 for of in row.seconds.values()]
            spread = (below, above)
        bars = ax.barh(
            list(values),
            list(values.values()),
            xerr=spread,
            ecolor="black",
            capsize=2,
            color=[color_of(name) for name in values],
        )
        labels = ax.bar_label(bars, texts, padding=3, fontsize="small")
        for text, name in zip(labels, values, strict=True):
            text.set_color(LOST if _wins(row, name) else "black")
        ax.invert_yaxis()
        # Room for the texts to the right of the bars.
        ax.margins(x=0.5)
        ax.set_xlabel(label)
        ax.set_title(f"{row.name}, {row.devices} devices", fontsize="medium")


def _wins(row, name):
    """Return whether a variant is faster than ours."""
    return isinstance(row, TimedRow) and is_slower(row.ratios.get(name, 1))


def _time(row, name):
    text = units.seconds(row.seconds[name].median)
    if name in row.ratios:
        text += f" ({row.ratios[name]:.2f} x ours)"
    return text
