"""Pictures of ``bench gpu``: ours beside a peer, a pair of bars for each comparison."""

from collections.abc import Mapping, Sequence

import matplotlib.figure

from bench import colors, units
from bench.rows import OURS, is_slower


def panels(rows: Sequence[Mapping]) -> dict[str, list[Mapping]]:
    """Return the comparisons of each part, without parts that have none.

    Args:
      rows: as JSON has them.
    """
    found: dict[str, list[Mapping]] = {}
    for row in rows:
        if row["kind"] == "figure":
            found.setdefault(row["part"], []).append(row)
    return found


def save(path: str, rows: Sequence[Mapping], title: str, caption: str = "") -> None:
    """Draw the comparisons of one part.

    Args:
      path: where to; the ending says which format.
      rows: of one part.
      title: says on which machine.
      caption: stands below, in small letters.
    """
    height = 0.5 * len(rows) + 1.2 + 0.2 * len(caption.splitlines())
    figure = matplotlib.figure.Figure((10.0, height), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    figure.supxlabel(caption, fontsize="x-small", x=0.01, ha="left")
    ax = figure.subplots()
    at = range(len(rows))
    lost = [is_slower(row["ratio"]) for row in rows]
    ax.barh(
        [y - 0.2 for y in at], [row["ours"] * 1e3 for row in rows], 0.4,
        color=colors.of(OURS), label=OURS,
    )  # fmt: skip
    bars = ax.barh(
        [y + 0.2 for y in at], [row["theirs"] * 1e3 for row in rows], 0.4,
        color=[colors.LOST if each else "tab:orange" for each in lost],
        label="the other; red: faster than jaxcomm",
    )  # fmt: skip
    texts = [
        f"{row['peer']}: {units.seconds(row['theirs'])}, {row['ratio']:.2f} x ours"
        for row in rows
    ]
    ax.bar_label(bars, texts, padding=3, fontsize="small")
    ax.set_yticks(list(at), [row["name"] for row in rows], fontsize="small")
    ax.set_xscale("log")
    ax.margins(x=0.4)
    ax.invert_yaxis()
    ax.set_xlabel("time of a call [ms]")
    figure.legend(loc="outside upper right", fontsize="small", frameon=False)
    is_svg = path.lower().endswith(".svg")
    figure.savefig(path, metadata={"Date": None} if is_svg else None)
