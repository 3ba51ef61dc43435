"""Collectives over size: time, bus bandwidth beside memcpy's, and ratio."""

from collections.abc import Sequence

import matplotlib.ticker

from bench import bandwidth, colors, units
from bench.collectives import FLOOR, FLOOR_VARIANT
from bench.rows import OURS, TimedRow, is_slower

# Inches of one plot, and collectives beside each other: letters can be read on a page
# of 390 pixels.
_WIDE, _DOWN, _ACROSS = 2.3, 1.5, 2
_MEMCPY = "memcpy"
_SLOWER = "jaxcomm is slower"


def size(rows: Sequence[TimedRow]) -> tuple[float, float]:
    """Return the inches that :func:`draw` needs, across and down."""
    blocks = len(_blocks(rows))
    return _WIDE * _ACROSS + 1, blocks * (3 * _DOWN + 0.4) + 0.6


def draw(figure, rows: Sequence[TimedRow]) -> None:
    """Draw three plots for each collective, below each other.

    A cross marks sizes at which another variant is faster than ours.

    Args:
      figure: an empty figure or part of one.
      rows: of one suite and one number of devices.
    """
    blocks = _blocks(rows)
    floor = _sorted(rows, FLOOR)
    parts = figure.subfigures(max(1, len(blocks)), 1, squeeze=False)[:, 0]
    shown: dict = {}
    for part, ops in zip(parts, blocks, strict=False):
        _draw_block(part, rows, ops, floor)
        for ax in part.axes:
            handles, names = ax.get_legend_handles_labels()
            shown |= dict(zip(names, handles, strict=True))
    figure.legend(
        shown.values(), shown.keys(), loc="outside upper center", ncols=3,
        fontsize="small", frameon=False,
    )  # fmt: skip


def _draw_block(figure, rows, ops, floor):
    axes = figure.subplots(3, _ACROSS, squeeze=False, sharex=True, sharey="row")
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
    for ax in axes[:, : len(ops)].flat:
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        ax.tick_params(labelsize="x-small", left=False, bottom=False)
    for ax in axes[:, len(ops) :].flat:
        ax.set_axis_off()
    axes[2, 0].set_xlabel("operand of each device", fontsize="small")


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


def _blocks(rows):
    ops = list(dict.fromkeys(row.name for row in rows if row.name != FLOOR))
    return [ops[i : i + _ACROSS] for i in range(0, len(ops), _ACROSS)]


def _sorted(rows, name):
    found = [row for row in rows if row.name == name]
    return sorted(found, key=lambda row: row.payload_bytes)
