"""The page about a run: docs/mutation.md."""

import collections
import pathlib
import tomllib

from mutation.defects import Defect

ENOUGH = 0.95
_EQUIVALENT = pathlib.Path(__file__).with_name("equivalent.toml")

_HEAD = """# Defects that the tests catch

`make mutation` wrote this page. Seed {seed} draws {drawn} small defects, of which it
put {count} into copies of the package before its time was over. For each it runs the
tests that execute the line, until one fails. Results stay in `build/mutation`: a later
run tries survivors and changed lines alone. A defect is *equivalent* if no result can
show it. The reasons come from `tools/mutation/equivalent.toml`.

**{caught} of {real} defects that are not equivalent were caught: {share:.1%}.** {hung}
"""


def page(tried: list[tuple[Defect, dict]], drawn: int, seed: int) -> tuple[str, bool]:
    """Return the page as Markdown, and whether enough was caught."""
    why = {
        each["name"]: each["why"]
        for each in tomllib.loads(_EQUIVALENT.read_text()).get("defect", [])
    }
    files: dict[str, collections.Counter] = {}
    survivors, equivalents = [], []
    for defect, result in tried:
        counts = files.setdefault(defect.file, collections.Counter())
        counts["tried"] += 1
        if result["outcome"] in ("caught", "hung"):
            counts["caught"] += 1
            counts["hung"] += result["outcome"] == "hung"
        elif defect.name in why:
            counts["equivalent"] += 1
            equivalents.append(defect)
        else:
            survivors.append(defect)
    total = sum(files.values(), collections.Counter())
    real = total["tried"] - total["equivalent"]
    share = total["caught"] / max(real, 1)
    lines = [
        _HEAD.format(
            count=total["tried"],
            seed=seed,
            drawn=drawn,
            caught=total["caught"],
            real=real,
            share=share,
            hung=f"{total['hung']} of them made a test hang." if total["hung"] else "",
        ),
        "| file | defects | caught | equivalent | survived |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for file, c in sorted(files.items()):
        left = c["tried"] - c["caught"] - c["equivalent"]
        row = (f"`{file}`", c["tried"], c["caught"], c["equivalent"], left)
        lines.append("| " + " | ".join(map(str, row)) + " |")
    if survivors:
        lines += ["", "## Survivors", ""]
        for defect in sorted(survivors, key=_place):
            lines += _bullets(defect)
    if equivalents:
        lines += ["", "## Equivalent", ""]
        for defect in sorted(equivalents, key=_place):
            lines += [*_bullets(defect), f"  * {why[defect.name]}"]
    return "\n".join(lines) + "\n", share >= ENOUGH


def _place(defect: Defect):
    return defect.file, defect.line


def _bullets(defect: Defect) -> list[str]:
    """Return the file, and below it the line and what became of it."""
    old, new = (" ".join(text.split()) for text in (defect.old, defect.new))
    return [
        f"* `{defect.file}`",
        f"  * `{defect.source}`",
        f"  * `{old}` became `{new}`",
    ]
