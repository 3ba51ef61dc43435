"""Draw the loss curve."""

import pathlib

from matplotlib.figure import Figure


def plot_losses(path: pathlib.Path, losses: list[float], validation: float) -> None:
    """Write a PNG of the loss of every step, and of the text held out at the end.

    Args:
      path: of the file.
      losses: in nats per byte, one for each step.
      validation: loss on the text held out.
    """
    # A Figure by itself, without pyplot, needs no display and keeps no global state.
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, marker="." if len(losses) < 30 else "", label="training")
    axes.plot(len(losses), validation, "o", label=f"held out: {validation:.3f}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title("Byte-level transformer, its sequence split over a ring")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
