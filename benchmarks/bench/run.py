"""Measure case after case, showing progress, until the end or Ctrl-C."""

from collections.abc import Sequence

import rich.progress
from rich.console import Console

from bench.cases import Case, Session
from bench.rows import FailedRow, Row


def run(cases: Sequence[Case], session: Session, rows: list[Row], console: Console):
    """Measure the cases, appending to ``rows`` as they are done.

    A case that raises becomes a ``FailedRow`` and the next begins.

    Args:
      cases: what to measure, in order.
      session: what they share.
      rows: appended to, so that an interrupt loses none.
      console: shows a progress bar if it is a terminal, else nothing.

    Raises:
      KeyboardInterrupt: the user has had enough; ``rows`` holds what there is.
    """
    progress = rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        console=console,
        transient=True,
        # Rich would otherwise print the last state of the bar into a file or pipe.
        disable=not console.is_terminal,
    )
    with progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            where = f"{case.suite}: {case.name}, {case.devices} devices"
            progress.update(task, description=where)
            rows.extend(measure(case, session))
            progress.advance(task)


def measure(case: Case, session: Session) -> Sequence[Row]:
    """Measure a case; if it raises, its row is a ``FailedRow``."""
    try:
        return case.measure(session)
    # A case that fails, out of memory perhaps, says so in its row; the rest go on.
    except Exception as error:
        text = " ".join(str(error).split())
        return [
            FailedRow(
                suite=case.suite,
                name=case.name,
                devices=case.devices,
                detail=case.detail,
                target=case.target,
                error=f"{type(error).__name__}: {text}",
            )
        ]
