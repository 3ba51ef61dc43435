"""Run part after part, saying what they find, until the end or Ctrl-C."""

import sys
import time
from collections.abc import Sequence

import jax
import rich.progress
from rich.console import Console

import jaxcomm
from bench.gpu import rows, table
from bench.gpu.parts import PARTS
from bench.gpu.record import Record
from bench.gpu.timer import Timer

# As a shell reports a program that SIGINT ended.
_INTERRUPTED = 130


def run(names, timer: Timer, heading: Sequence[str], record: Record) -> int:
    """Runs parts; returns the exit status.

    Args:
      names: keys of ``PARTS``.
      timer: what they measure with.
      heading: what they run on, in lines.
      record: where rows are kept.
    """
    # One of several processes speaks.
    speaks = jax.process_index() == 0
    out = Console(width=None if sys.stdout.isatty() else 200, quiet=not speaks)
    err = Console(stderr=True, quiet=not speaks, soft_wrap=True)
    out.print("\n".join(heading), highlight=False)
    made, status = [], 0

    def tell(name, row):
        made.append(row)
        record.add(name, row)
        err.print(f"{name}: {row}", markup=False, highlight=False)

    progress = rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        console=err,
        transient=True,
        # Rich would otherwise print the last state of the bar into a file or pipe.
        disable=not err.is_terminal,
    )
    try:
        with progress:
            task = progress.add_task("", total=len(names))
            for name in names:
                progress.update(task, description=name)
                begun = time.monotonic()
                record.begin(name)
                _measure(name, timer, tell)
                record.end(name, time.monotonic() - begun)
                progress.advance(task)
    except KeyboardInterrupt:
        status = _INTERRUPTED
    finally:
        # Also of a run of several processes that failed.
        for renderable in table.tables(made):
            out.print(renderable)
    return status or int(
        any(row.kind == "finding" and row.is_met is False for row in made)
    )


def _measure(name, timer, tell):
    # Those of the part before.
    jaxcomm.finalize()
    try:
        for row in PARTS[name](timer):
            tell(name, row)
    # It says so in a row; the rest go on.
    except Exception as error:
        if jax.process_count() > 1:
            # The other processes may be anywhere by now.
            raise
        text = " ".join(f"{type(error).__name__}: {error}".split())
        tell(name, rows.Finding(name, text, False))
