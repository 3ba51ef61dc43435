"""Flight records as a picture: a row for each rank, a bar for each operation."""

import textwrap
from collections.abc import Sequence
from typing import Any

from jaxcomm.diagnostics import record, table
from jaxcomm.diagnostics.merge import Merged
from jaxcomm.diagnostics.timeline import Bar, Timeline, rows, timeline

_HATCHES = {record.COMPLETED: "", record.STARTED: "////", record.FAILED: "xxxx"}
_WORDS = {record.STARTED: "not ended", record.FAILED: "failed"}
_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
# More names on the axis would cover each other.
_MOST_NAMES = 32
# Of a row: between rows there is a gap.
_HEIGHT = 0.8
_TITLE_WIDTH = 90


def plot(merged: Merged, ax: Any = None) -> Any:
    """Draw the operations of some processes; see ``FlightRecord.plot``."""
    found = timeline(merged)
    by_row = rows(found.bars, lambda bar: bar.device)
    ax = _axes(len(by_row)) if ax is None else ax
    unit, scale = _unit(found.end - found.start)
    colors = _colors(sorted({bar.entry.name for bar in found.bars}))
    shown: dict[tuple[str, str], list[tuple[tuple, tuple]]] = {}
    for y, levels in enumerate(by_row.values()):
        for level, bars in enumerate(levels):
            height = _HEIGHT / len(levels)
            bottom = y - _HEIGHT / 2 + level * height
            for bar in bars:
                at = (bar.start - found.start) / scale, (bar.end - bar.start) / scale
                kind = bar.entry.name, bar.entry.state
                shown.setdefault(kind, []).append((at, (bottom, height)))
    for (name, state), places in sorted(shown.items()):
        _draw(ax, name, state, places, colors[name])
    _name_rows(ax, by_row)
    ax.set_xlabel(f"{unit} after {table.clock(found.start)}")
    ax.set_xlim(0, max((found.end - found.start) / scale, 1e-9))
    ax.set_title(_takeaway(merged, found), loc="left", wrap=True)
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return ax


def _axes(count: int):
    try:
        from matplotlib import pyplot
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "FlightRecord.plot draws with matplotlib, which is not installed. Run "
            "pip install 'jaxcomm[plot]', or write a trace for ui.perfetto.dev with "
            "FlightRecord.save_trace.",
            name=error.name,
        ) from None
    height = min(1.4 + 0.4 * count, 12)
    return pyplot.subplots(figsize=(10, height), layout="constrained")[1]


def _unit(seconds: float) -> tuple[str, float]:
    return next((unit for unit in _UNITS if seconds >= 2 * unit[1]), _UNITS[-1])


def _draw(ax, name: str, state: str, places, color) -> None:
    """Draw the bars of one kind: one collection, however many they are."""
    from matplotlib.collections import PolyCollection

    corners = [
        ((x, y), (x + width, y), (x + width, y + height), (x, y + height))
        for (x, width), (y, height) in places
    ]
    label = name if state == record.COMPLETED else f"{name}, {_WORDS[state]}"
    bars = PolyCollection(
        corners,
        facecolor=color if state == record.COMPLETED else "white",
        # An edge keeps bars visible that are thinner than a pixel.
        edgecolor=color,
        linewidth=0.8,
        hatch=_HATCHES[state],
        label=label,
    )
    ax.add_collection(bars)


def _colors(names: Sequence[str]) -> dict[str, Any]:
    from matplotlib import colormaps

    shades = colormaps["tab10" if len(names) <= 10 else "tab20"]
    return {name: shades(i % shades.N) for i, name in enumerate(names)}


def _name_rows(ax, by_row: dict[tuple[str, int], list[list[Bar]]]) -> None:
    names = [f"{platform}:{device}" for platform, device in by_row]
    ranks = [
        {bar.entry.rank for level in levels for bar in level}
        for levels in by_row.values()
    ]
    # A device may have another rank on each communicator.
    if all(len(own) == 1 for own in ranks):
        names = [
            f"rank {own.pop()} ({name})" for own, name in zip(ranks, names, strict=True)
        ]
    step = -(-len(names) // _MOST_NAMES)
    ax.set_yticks(range(0, len(names), step), names[::step])
    # The first rank on top.
    ax.set_ylim(len(names) - 0.5, -0.5)


def _takeaway(merged: Merged, found: Timeline) -> str:
    """Say what is wrong, else how much of the time went into collectives."""
    if merged.findings:
        text = merged.findings[0].text
    else:
        by_row = rows(found.bars, lambda bar: bar.device)
        busy = sum(_covered(levels) for levels in by_row.values())
        whole = len(by_row) * (found.end - found.start)
        count = len(by_row)
        share = f"{busy / whole:.0%} of " if whole > 0 else ""
        text = (
            f"{count} rank{'s' if count > 1 else ''} spent {share}"
            f"{table.duration(found.end - found.start)} in collectives"
        )
    return "\n".join(textwrap.wrap(text, _TITLE_WIDTH))


def _covered(levels: list[list[Bar]]) -> float:
    """Return the seconds during which at least one of the bars lasts."""
    total, until = 0.0, float("-inf")
    bars = [bar for level in levels for bar in level]
    for bar in sorted(bars, key=lambda bar: bar.start):
        total += max(bar.end - max(bar.start, until), 0)
        until = max(until, bar.end)
    return total
