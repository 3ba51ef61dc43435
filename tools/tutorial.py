"""Write into docs/tutorial.md what each step of examples/tutorial changes.

    python tools/tutorial.py

A step is a program, and the page shows how it differs from the step before. The tests
compare the page with the programs, and run them.
"""

import difflib
import itertools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
STEPS = sorted((ROOT / "examples" / "tutorial").glob("step*.py"))


def changes(before: str, after: str) -> str:
    """Return a diff whose hunks name the function or class that they begin in."""
    new = after.splitlines(keepends=True)
    lines = difflib.unified_diff(before.splitlines(keepends=True), new, n=1)
    shown = []
    for line in itertools.islice(lines, 2, None):  # without the names of the files
        if hunk := re.match(r"@@ -\S+ \+(\d+)", line):
            above = "".join(new[: int(hunk[1]) + 1])  # and the first line that changed
            names = re.findall(r"^(?:def|class) (\w+)|^(?=\S)", above, re.M)
            line = f"@@ {names[-1] or 'top level'} @@\n"
        shown.append(line.rstrip() + "\n")
    return "".join(shown)


def with_changes(page: str) -> str:
    """Return the page with the diff of each step in place of the one it has."""
    texts = [path.read_text() for path in STEPS]
    for path, (before, after) in zip(STEPS[1:], itertools.pairwise(texts), strict=True):
        start = page.index(f"(../examples/tutorial/{path.name})")
        head, tail = page[:start], page[start:]
        fence = f"```diff\n{changes(before, after)}```\n"
        page = head + re.sub(
            r"^```diff\n.*?^```\n",
            lambda _, f=fence: f,
            tail,
            count=1,
            flags=re.M | re.S,
        )
    return page


if __name__ == "__main__":
    PAGE.write_text(with_changes(PAGE.read_text()))
