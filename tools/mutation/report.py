"""The page about the runs: docs/mutation.md. Each run writes its own section."""

import collections
import pathlib
import re
import tomllib

from mutation.defects import Defect

ENOUGH = 0.95
_EQUIVALENT = pathlib.Path(__file__).with_name("equivalent.toml")
_SEEN = ("caught", "hung")

PYTHON = "Python"
CPP = "C++"
_HEADS = {
    PYTHON: """\
`make mutation` wrote this section. Seed {seed} draws {drawn} small edits of operators,
conditions and calls in four folders: `attention`, `collectives`, `communicator` and
`primitives`. It put {count} of them into copies of the package before its time was
over. For each it runs the tests that execute the line, until one fails.""",
    CPP: """\
`make mutation-cpp` wrote this section. Seed {seed} draws {drawn} edits of single lines
of `ffi/`, of all kinds in equal numbers. {count} of them compiled and were tried before
the time was over. For each it runs the nearest C++ tests, and if they pass, the nearest
files of pytest. The wider suite may catch more. A test that fails counts if it passes
without the edit.""",
}


def write(
    path: pathlib.Path,
    part: str,
    tried: list[tuple[Defect, dict]],
    drawn: int,
    seed: int,
) -> bool:
    """Replace a run's section of the page; return whether enough was caught."""
    text, is_enough = section(part, tried, drawn, seed)
    page = path.read_text()
    pattern = re.compile(rf"^## {re.escape(part)}\n.*?(?=^## |\Z)", re.M | re.S)
    page = pattern.sub(lambda _: "", page).rstrip() + "\n\n"
    path.write_text(page + text)
    print(text)
    return is_enough


def section(part, tried, drawn: int, seed: int) -> tuple[str, bool]:
    """Return a section in Markdown, and whether enough was caught."""
    why = {
        each["name"]: each["why"]
        for each in tomllib.loads(_EQUIVALENT.read_text()).get("defect", [])
    }
    rows: dict[str, collections.Counter] = {}
    survivors, equivalents = [], []
    for defect, result in tried:
        if result["outcome"] not in (*_SEEN, "survived"):
            continue  # it does not compile, or the tests fail without it
        counts = rows.setdefault(
            defect.file if part == PYTHON else defect.kind, collections.Counter()
        )
        counts["tried"] += 1
        if result["outcome"] in _SEEN:
            counts["caught"] += 1
            counts["hung"] += result["outcome"] == "hung"
        elif defect.name in why:
            counts["equivalent"] += 1
            equivalents.append(defect)
        else:
            survivors.append(defect)
    total = sum(rows.values(), collections.Counter())
    real = total["tried"] - total["equivalent"]
    share = total["caught"] / max(real, 1)
    head = _HEADS[part].format(seed=seed, drawn=drawn, count=total["tried"])
    hung = f" {total['hung']} of them made a test hang." if total["hung"] else ""
    lines = [
        f"## {part}",
        "",
        head,
        "",
        f"**{total['caught']} of {real} defects that are not equivalent were caught: "
        f"{share:.1%}.**{hung}",
        "",
        f"| {'file' if part == PYTHON else 'edit'} | defects | caught | equivalent "
        f"| survived |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, c in sorted(rows.items()):
        left = c["tried"] - c["caught"] - c["equivalent"]
        shown = f"`{name}`" if part == PYTHON else name
        row = (shown, c["tried"], c["caught"], c["equivalent"], left)
        lines.append("| " + " | ".join(map(str, row)) + " |")
    if survivors:
        lines += ["", f"### Survivors: {part}", ""]
        for defect in sorted(survivors, key=_place):
            lines += _bullets(defect)
    if equivalents:
        lines += ["", f"### Equivalent: {part}", ""]
        for defect in sorted(equivalents, key=_place):
            lines += [*_bullets(defect), f"  * {why[defect.name]}"]
    return "\n".join(lines) + "\n", share >= ENOUGH


def _place(defect: Defect):
    return defect.file, defect.line


def _bullets(defect: Defect) -> list[str]:
    """Return the file, and below it the line and what became of it."""
    old, new = (" ".join(text.split()) for text in (defect.old, defect.new))
    new = "nothing" if new == ";" else new
    return [
        f"* `{defect.file}`",
        f"  * `{defect.source}`",
        f"  * `{old}` became `{new}`",
    ]
