"""The picture: lines over size for collectives, bars for everything else."""

from collections.abc import Sequence

import matplotlib

# Works without a display, and leaves the backend of a notebook alone elsewhere.
matplotlib.use("agg")

import matplotlib.figure
import matplotlib.ticker

from bench import collectives, units
from bench.rows import GLOO, LAX, OURS, MemoryRow, ProcessesRow, Row, TimedRow
from bench.targets import MIB

# The names of the variants need as much room as their bars.
_BARS_ACROSS = 2
_COLORS = {
    OURS: "tab:blue",
    LAX: "tab:orange",
    GLOO: "tab:orange",
    collectives.FLOOR_VARIANT: "tab:gray",
}


def supports(path: str) -> bool:
    """Return whether the name's ending is a format that can be written."""
    known = matplotlib.figure.Figure().canvas.get_supported_filetypes()
    return path.rpartition(".")[2].lower() in known


def save(path: str, rows: Sequence[Row], title: str) -> None:
    """Draw one panel for each suite, below each other.

    Args:
      path: where to; the ending says which format.
      rows: of any suites. Failed ones are left out.
      title: says on which machine.
    """
    suites: dict[str, list[Row]] = {}
    for row in rows:
        if isinstance(row, TimedRow | MemoryRow):
            suites.setdefault(row.suite, []).append(row)
    panels = {suite: _grid(of_suite) for suite, of_suite in suites.items()}
    heights = [2.6 * height + 0.8 for height, _ in panels.values()]
    # 10 inches hold the title.
    width = max([10.0, *(3.0 * width + 1 for _, width in panels.values())])
    figure = matplotlib.figure.Figure((width, sum(heights) + 0.6), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    if suites:
        parts = figure.subfigures(len(suites), 1, height_ratios=heights, squeeze=False)
        for part, (suite, of_suite) in zip(parts[:, 0], suites.items(), strict=True):
            part.suptitle(suite, fontweight="bold")
            is_lines = suite == collectives.SUITE
            # Ops of one mesh are comparable; the bars have their own names.
            sharey = "row" if is_lines else False
            draw = _lines if is_lines else _bars
            axes = part.subplots(*panels[suite], squeeze=False, sharey=sharey)
            draw(axes, of_suite)
    figure.savefig(path, dpi=120)


def _grid(rows):
    """Return how many plots a suite needs, downwards and across."""
    if rows[0].suite == collectives.SUITE:
        return len(_distinct(rows, "devices")), max(1, len(_ops(rows)))
    return -(-len(rows) // _BARS_ACROSS), _BARS_ACROSS


def _lines(axes, rows):
    ops, devices = _ops(rows), _distinct(rows, "devices")
    floors = [row for row in rows if row.name == collectives.FLOOR]
    for y, count in enumerate(devices):
        for x, name in enumerate(ops):
            ax = axes[y, x]
            of_op = [row for row in rows if (row.name, row.devices) == (name, count)]
            of_floor = [row for row in floors if row.devices == count]
            for variant, of in (
                (OURS, of_op),
                (LAX, of_op),
                (collectives.FLOOR_VARIANT, of_floor),
            ):
                of = sorted(of, key=lambda row: row.payload_bytes)
                ax.loglog(
                    [row.payload_bytes for row in of],
                    [row.seconds[variant].median * 1e6 for row in of],
                    marker="o",
                    markersize=3,
                    color=_COLORS[variant],
                    linestyle=":" if variant == collectives.FLOOR_VARIANT else "-",
                    label=variant,
                )
            sizes = [row.payload_bytes for row in of_op]
            ax.set_xticks(sizes, [units.size(size) for size in sizes], rotation=45)
            ax.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
            ax.set_title(f"{name}, {count} devices", fontsize="medium")
            ax.grid(alpha=0.3)
            if x == 0:
                ax.set_ylabel("time of a call [us]")
            if y == len(devices) - 1:
                ax.set_xlabel("operand of each device [bytes]")
    axes[0, 0].legend(fontsize="small")


def _bars(axes, rows):
    for ax, row in zip(axes.flat, rows, strict=False):
        if isinstance(row, MemoryRow):
            values = {name: held / MIB for name, held in row.temp_bytes.items()}
            texts = [units.size(held) for held in row.temp_bytes.values()]
            label, spread = "temporary memory of a device [MiB]", None
        else:
            values = {name: of.median * 1e3 for name, of in row.seconds.items()}
            texts = [units.seconds(of.median) for of in row.seconds.values()]
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
            color=[_COLORS.get(name, "tab:green") for name in values],
        )
        ax.bar_label(bars, texts, padding=3)
        ax.invert_yaxis()
        # Room for the texts to the right of the bars.
        ax.margins(x=0.35)
        ax.set_xlabel(label)
        where = f"{row.devices} devices"
        if isinstance(row, ProcessesRow):
            where = f"{units.size(row.payload_bytes)}, {row.devices} processes"
        ax.set_title(f"{row.name}, {where}", fontsize="medium")
    for ax in axes.flat[len(rows) :]:
        ax.set_axis_off()


def _ops(rows):
    return [name for name in _distinct(rows, "name") if name != collectives.FLOOR]


def _distinct(rows, attribute):
    return list(dict.fromkeys(getattr(row, attribute) for row in rows))
