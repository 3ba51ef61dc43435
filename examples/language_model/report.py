"""What the user sees while and after the model trains."""

import contextlib
import sys
import time
from collections.abc import Sequence

import rich.progress

import jaxcomm
from jaxcomm.communicator import text_table


class Timings:
    """How long each phase took.

    >>> timings = Timings()
    >>> with timings.phase("compile"):
    ...     pass
    """

    def __init__(self):
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str):
        """Add the time until the block ends to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + spent

    def __str__(self) -> str:
        """Draw a table, a line for each phase and the total."""
        rows = [*self._seconds.items(), ("total", sum(self._seconds.values()))]
        return "\n".join(f"  {name:<22}{seconds:7.1f} s" for name, seconds in rows)


class TrainingProgress:
    """A progress bar on a terminal; about a dozen lines in a log.

    Args:
      done: steps taken by earlier runs.
      steps: in total.
      tokens_per_step: in all sequences together.
      is_shown: whether anything is.
    """

    def __init__(
        self, done: int, steps: int, tokens_per_step: int, *, is_shown: bool = True
    ):
        self._is_shown = is_shown
        self._first, self._steps, self._tokens = done, steps, tokens_per_step
        self._started = self._printed = time.perf_counter()
        self._bar = None

    def __enter__(self) -> "TrainingProgress":
        if self._is_shown and sys.stdout.isatty():
            self._bar = rich.progress.Progress(
                "training",
                rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(),
                "loss {task.fields[loss]}",
                "{task.fields[rate]} tokens/s",
                rich.progress.TimeRemainingColumn(elapsed_when_finished=True),
            )
            self._task = self._bar.add_task(
                "", completed=self._first, total=self._steps, loss="-", rate="-"
            )
            self._bar.start()
        self._started = self._printed = time.perf_counter()
        return self

    def __exit__(self, *exc_info) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, step: int, loss: float) -> None:
        """Show that ``step`` steps are done, the last of them with this loss."""
        now = time.perf_counter()
        rate = (step - self._first) * self._tokens / (now - self._started)
        if self._bar is not None:
            self._bar.update(
                self._task, completed=step, loss=f"{loss:.3f}", rate=f"{rate:,.0f}"
            )
            return
        # A log is read later: a dozen lines tell it, and a slow run still gives signs.
        tenth = max(1, self._steps // 10)
        if not self._is_shown:
            return
        news = step - self._first == 1 or step % tenth == 0 or step == self._steps
        if news or now - self._printed > 30:
            self._printed = now
            left = (self._steps - step) * self._tokens / rate
            print(
                f"step {step}/{self._steps}  loss {loss:.3f}  {rate:,.0f} tokens/s  "
                f"{left:.0f} s left",
                flush=True,
            )


def comparison_table(
    losses: list[float], reference: list[float], first: int, tolerance: float
) -> str:
    """Draw the losses of the same steps on the mesh and on one device.

    >>> print(comparison_table([5.5], [5.5], 0, 1e-4))
      step     the ring   one device   difference
         1     5.500000     5.500000      0.0e+00
      largest difference 0.0e+00, allowed 1.0e-04: equal
    """
    lines = [f"  {'step':>4} {'the ring':>12} {'one device':>12} {'difference':>12}"]
    for i, (loss, expected) in enumerate(zip(losses, reference, strict=True)):
        difference = abs(loss - expected)
        lines.append(
            f"  {first + i + 1:>4} {loss:>12.6f} {expected:>12.6f} {difference:>12.1e}"
        )
    largest = largest_difference(losses, reference)
    verdict = "equal" if largest <= tolerance else "NOT EQUAL"
    lines.append(
        f"  largest difference {largest:.1e}, allowed {tolerance:.1e}: {verdict}"
    )
    return "\n".join(lines)


def largest_difference(losses: list[float], reference: list[float]) -> float:
    """Return the largest difference of two lists; infinite where one is NaN."""
    pairs = zip(losses, reference, strict=True)
    differences = [abs(loss - expected) for loss, expected in pairs]
    return max(d if d == d else float("inf") for d in differences)


def traffic(communicators: Sequence[jaxcomm.Communicator]) -> str:
    """Say what went through the communicators so far."""
    if any(member.backend == "xla" for member in communicators):
        return "moved by XLA's own collectives, which do not count"
    stats = [member.stats() for member in communicators]
    calls = sum(sum(each["calls"].values()) for each in stats)
    moved = sum(each["bytes"] for each in stats)
    return f"{calls:,} collective calls were handed {text_table.size(moved)}"
