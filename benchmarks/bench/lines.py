"""Collectives over size: time, bus bandwidth beside memcpy's, and ratio."""

from collections.abc import Sequence

import matplotlib.ticker

from bench import bandwidth, colors, units
from bench.collectives import FLOOR, FLOOR_VARIANT
from bench.rows import OURS, TimedRow, is_slower

# Inches of one plot.
_ACROSS, _DOWN = 2.3, 1.7
_MEMCPY = "memcpy"
_SLOWER = "jaxcomm is slower"


def size(rows: Sequence[TimedRow]) -> tuple[float, float]:
    """Return the inches that :func:`draw` needs, across and down."""
    return _ACROSS * max(1, len(_ops(rows))) + 1, 3 * _DOWN + 1.2


def draw(figure, rows: Sequence[TimedRow]) -> None:
    """Draw three plots for each collective, below each other.

    A cross marks sizes at which another variant is faster than ours.

    Args:
      figure: an empty figure or part of one.
      rows: of one suite and one number of devices.
    """
    ops = _ops(rows)
    shape = 3, max(1, len(ops))
    axes = figure.subplots(*shape, squeeze=False, sharex=True, sharey="row")
    floor = _sorted(rows, FLOOR)
    for column, name in zip(axes.T, ops, strict=False):
        of_op = _sorted(rows, name)
        _times(column[0], of_op, floor)
        _bandwidths(column[1], of_op)
        _ratios(column[2], of_op)
        column[0].set_title(name, fontsize="medium")
        bytes_of = [row.payload_bytes for row in of_op]
        texts = [units.size(each) for each in bytes_of]
        column[2].set_xticks(bytes_of, texts, rotation=45, fontsize="x-small")
    labels = ("time of a call [us]", "bus bandwidth [GB/s]", "its time / jaxcomm's")
    for ax, label in zip(axes[:, 0], labels, strict=True):
        ax.set_ylabel(label, fontsize="small")
    for ax in axes.flat:
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        ax.tick_params(labelsize="x-small", left=False, bottom=False)
    middle = axes[2, len(ops) // 2]
    middle.set_xlabel("operand of each device", fontsize="small")
    shown = {
        label: handle
        for ax in axes.flat
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        shown.values(), shown.keys(), loc="outside upper center", ncols=len(shown),
        fontsize="small", frameon=False,
    )  # fmt: skip


def _times(ax, rows, floor):
    for variant in _variants(rows):
        of = [row for row in rows if variant in row.seconds]
        _curve(ax, of, [row.seconds[variant].median * 1e6 for row in of], variant)
    slower = [row for row in rows if any(map(is_slower, row.ratios.values()))]
    if slower:
        ours = [row.seconds[OURS].median * 1e6 for row in slower]
        sizes = [row.payload_bytes for row in slower]
        ax.plot(sizes, ours, "x", color=colors.LOST, label=_SLOWER, zorder=3)
    if floor:
        least = [row.seconds[FLOOR_VARIANT].median * 1e6 for row in floor]
        _curve(ax, floor, least, FLOOR_VARIANT, linestyle=":")
    ax.set_yscale("log")


def _bandwidths(ax, rows):
    for variant in _variants(rows):
        of = [row for row in rows if variant in row.seconds]
        rates = [bandwidth.bus(row, row.seconds[variant].median) / 1e9 for row in of]
        _curve(ax, of, rates, variant)
    at_most = [bandwidth.at_roofline(row) / 1e9 for row in rows]
    ax.plot(
        [row.payload_bytes for row in rows], at_most, "--", color="black", label=_MEMCPY
    )
    ax.set_yscale("log")
    ax.text(
        0.97, 0.04, f"= {bandwidth.factor(rows[0]):.3g} x size / time", ha="right",
        fontsize="x-small", transform=ax.transAxes,
    )  # fmt: skip


def _ratios(ax, rows):
    for variant in _variants(rows):
        of = [row for row in rows if variant in row.ratios]
        if of:
            _curve(ax, of, [row.ratios[variant] for row in of], variant)
    ax.axhline(1, color=colors.LOST, linewidth=1)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))


def _curve(ax, rows, values, variant, linestyle="-"):
    ax.plot(
        [row.payload_bytes for row in rows],
        values,
        marker="o",
        markersize=3,
        linestyle=linestyle,
        color=colors.of(variant),
        label=variant,
    )


def _variants(rows):
    return list(dict.fromkeys(name for row in rows for name in row.seconds))


def _ops(rows):
    return list(dict.fromkeys(row.name for row in rows if row.name != FLOOR))


def _sorted(rows, name):
    found = [row for row in rows if row.name == name]
    return sorted(found, key=lambda row: row.payload_bytes)
