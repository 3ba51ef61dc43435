"""Runs the Python blocks of a page one after the other, as its reader would.

Writes JSON: for each block what it printed, and its traceback or None. In a process of
its own, because pages choose the number of CPU devices.

    python run_page.py PAGE RESULTS
"""

import contextlib
import io
import json
import sys
import traceback
from pathlib import Path

from blocks import blocks


def main(page: str, results: str) -> None:
    """Run the page; one namespace serves all its blocks."""
    namespace = {"__name__": "__main__"}
    outcomes = []
    for block in blocks(Path(page).read_text()):
        printed, error = io.StringIO(), None
        with contextlib.redirect_stdout(printed):
            try:
                # Its line numbers are those of the page.
                source = "\n" * block.line + block.code
                exec(compile(source, page, "exec"), namespace)
            except Exception:
                error = traceback.format_exc()
        outcomes.append({"printed": printed.getvalue(), "error": error})
    Path(results).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
