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
    height = 0.75 * len(rows) + 1.2 + 0.2 * len(caption.splitlines())
    # Letters can be read on a page of 390 pixels.
    figure = matplotlib.figure.Figure((5.6, height), layout="constrained")
    figure.supxlabel(caption, fontsize="x-small", x=0.01, ha="left")
    ax = figure.subplots()
    at = [2 * row for row in range(len(rows))]
    lost = [is_slower(row["ratio"]) for row in rows]
    ax.barh(
        [y - 0.2 for y in at], [row["ours"] * 1e3 for row in rows], 0.4,
        color=colors.of(OURS), label=OURS,
    )  # fmt: skip
    ax.barh(
        [y + 0.2 for y in at], [row["theirs"] * 1e3 for row in rows], 0.4,
        color=[colors.LOST if each else "tab:orange" for each in lost],
        label="the other; red: faster than jaxcomm",
    )  # fmt: skip
    for y, row in zip(at, rows, strict=True):
        theirs = f"{units.seconds(row['theirs'])}, {row['ratio']:.2f} x ours"
        text = ax.text(
            0.01, y - 0.45, f"{row['name']}\n{row['peer']}: {theirs}",
            fontsize="x-small", va="bottom", transform=ax.get_yaxis_transform(),
        )  # fmt: skip
        text.set_in_layout(False)
    ax.set_title(title, fontsize="small")
    ax.set_yticks([])
    ax.set_xscale("log")
    ax.set_ylim(at[-1] + 0.6, -1.5)
    ax.set_xlabel("time of a call [ms]")
    figure.legend(loc="outside upper center", ncols=2, fontsize="small", frameon=False)
    is_svg = path.lower().endswith(".svg")
    figure.savefig(path, metadata={"Date": None} if is_svg else None)
