"""Runs Python blocks one after the other in one namespace, as a page's reader would.

Reads JSON from stdin: the page's path and its blocks, each a line and code. Writes JSON
to stdout: for each block what it printed, and its traceback or None.
"""

import contextlib
import io
import json
import sys
import traceback


def main(page: str, blocks: list[dict]) -> list[dict]:
    """Return what each block printed and raised."""
    namespace = {"__name__": "__main__"}
    outcomes = []
    for block in blocks:
        printed, error = io.StringIO(), None
        with contextlib.redirect_stdout(printed):
            try:
                # Its line numbers are those of the page.
                code = "\n" * block["line"] + block["code"]
                exec(compile(code, page, "exec"), namespace)
            except Exception:
                error = traceback.format_exc()
        outcomes.append({"printed": printed.getvalue(), "error": error})
    return outcomes


if __name__ == "__main__":
    print(json.dumps(main(**json.load(sys.stdin))))
