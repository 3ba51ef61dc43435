"""The pictures and tables of README and performance.md, from what ``--json`` wrote.

``python -m bench.figures FOLDER PAGE...`` reads every JSON file of a folder, one for
each machine. Of CPUs it writes ``MACHINE-PANEL.svg`` beside it. It fills in the tables
between the marks ``<!-- MACHINE: PANEL -->`` and ``<!-- end -->`` of the pages. The
panel ``machine`` says what it is. ``all: speed`` is the README's.
"""

import dataclasses
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from bench import plot, report, units
from bench.collectives import FLOOR
from bench.gpu import pages, record
from bench.rows import OURS, Row, TimedRow, from_json, is_slower

# Letters as text: small files, and words that can be searched.
_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "jaxcomm"}
_DARK = """
@media (prefers-color-scheme: dark) {
text { fill: #ddd }
[style*="fill: #ffffff"] { fill: #131416 !important }
[style*="fill: #000000"] { fill: #ddd !important }
[style*="stroke: #000000"] { stroke: #ddd !important }
}
"""
# The first that is there serves the README.
_ON_GPUS = ("h100-x4", "four"), ("h100-x2", "two")
_MARK = re.compile(
    r"(?P<begin><!-- (?P<machine>[\w-]+): (?P<panel>[\w-]+) -->\n)"
    r".*?(?P<end><!-- end -->)",
    re.S,
)


def main(folder: Path, *pages: Path) -> None:
    """Draw all pictures of a folder and fill in the tables of pages.

    Raises:
      ValueError: a file is of another form, or a page asks for a panel that none has.
    """
    for path in sorted(folder.glob("*.json")):
        found = read(path)
        for name, rows in found.panels.items() if found.is_drawn else ():
            target = path.with_name(f"{path.stem}-{name}.svg")
            with matplotlib.rc_context(_STYLE):
                plot.save(str(target), rows, found.title, found.caption)
            _finish(target)
            print(f"wrote {target}")
    for page in pages:
        text = page.read_text()
        if (new := filled(text, folder)) != text:
            page.write_text(new)
            print(f"wrote {page}")


def filled(text: str, folder: Path) -> str:
    """Return a page with its tables as the files of a folder have them."""
    known = {path.stem: read(path) for path in folder.glob("*.json")}
    return _MARK.sub(lambda mark: _filled(mark, known), text)


def _finish(path):
    """Leave out indentation, a third of the file; be dark where the page is."""
    text = re.sub(r"\n +", "\n", path.read_text())
    path.write_text(text.replace("<defs>", f"<style>{_DARK}</style>\n<defs>", 1))


@dataclasses.dataclass(frozen=True)
class File:
    """What one machine found.

    Attributes:
      title: says on which machine.
      caption: software, commands and commits, in a few lines.
      panels: their rows, by name.
      tables: the same as Markdown.
      is_drawn: whether the panels are pictures, too.
    """

    title: str
    caption: str
    panels: dict[str, Any]
    tables: dict[str, str]
    is_drawn: bool


def read(path: Path) -> File:
    """Return what a file says.

    Raises:
      ValueError: it is of another schema, or a row is of an unknown form.
    """
    document = json.loads(path.read_text())
    if document.get("schema") != report.SCHEMA:
        raise ValueError(
            f"{path} has schema {document.get('schema')!r} and not {report.SCHEMA}; "
            f"write it anew: make bench ARGS='... --json {path}'"
        )
    return (_of_gpus if "runs" in document else _of_cpus)(document)


def _of_cpus(document):
    machine = document["machine"]
    title = f"{machine['cpu']}, {machine['cores']} cores"
    panels = plot.panels([from_json(row) for row in document["rows"]])
    run = {**document, "load_average": machine["load_average"]}
    caption = _wrapped([_versions(document), _of_run(run)])
    tables = {name: table(rows) for name, rows in panels.items()}
    tables["machine"] = _as_code(f"{title}. {caption}\n")
    return File(title, caption, panels, tables, is_drawn=True)


def _of_gpus(document):
    title, software, *more = document["heading"]
    panels: dict[str, Any] = {}
    for row in record.all_rows(document):
        panels.setdefault(row["part"], []).append(row)
    caption = _wrapped([title, *more, software, _versions(document)])
    tables = {"machine": f"{caption}\n"}
    for part, rows in panels.items():
        runs = [
            run
            for run in document["runs"]
            if any(row["part"] == part for row in run["rows"])
        ]
        sources = _as_code(_wrapped(map(_with_flags, runs)))
        tables[part] = f"{pages.tables(rows)}\n{sources}\n"
    return File(title, caption, panels, tables, is_drawn=False)


def _versions(document):
    return ", ".join(f"{name} {of}" for name, of in document["versions"].items())


def _wrapped(sentences: Iterable[str]) -> str:
    return "\n".join(textwrap.wrap(". ".join(sentences), 100))


def _with_flags(run):
    flags = run.get("environment", {}).get("XLA_FLAGS")
    return _of_run(run) + (f" with XLA_FLAGS={flags}" if flags else "")


def _as_code(text):
    return re.sub(r'make bench ARGS="[^"]*"|XLA_FLAGS=\S+', r"`\g<0>`", text)


def _of_run(run):
    command = " ".join(_without_files(run["command"][len(report.COMMAND) :]))
    loads = [run["load_average"], run.get("load_average_at_end")]
    said = " to ".join(f"{each:.1f}" for each in loads if each is not None)
    return (
        f"Commit {run['commit'] or 'unknown'}, {run['started'][:10]}, "
        f'load {said or "unknown"}. make bench ARGS="{command}"'
    )


def table(rows: Sequence[Row]) -> str:
    """Return a panel of collectives as Markdown: time, and each rival's time over it.

    Ratios below 1 are in italics.
    """
    timed = [row for row in rows if isinstance(row, TimedRow) and row.name != FLOOR]
    sizes = sorted({row.payload_bytes or 0 for row in timed})
    rivals = list(dict.fromkeys(name for row in timed for name in row.ratios))
    head = ["collective", *(units.size(size) for size in sizes)]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for name in dict.fromkeys(row.name for row in timed):
        of = {row.payload_bytes: row for row in timed if row.name == name}
        cells = [_cell(of[size], rivals) if size in of else "" for size in sizes]
        lines.append("| " + " | ".join([f"`{name}`", *cells]) + " |")
    return "\n".join(lines) + "\n"


def _cell(row, rivals):
    ratios = [row.ratios.get(name) for name in rivals]
    texts = ["-" if of is None else f"{of:.2f}" for of in ratios]
    marked = [
        f"*{text}*" if of is not None and is_slower(of) else text
        for text, of in zip(texts, ratios, strict=True)
    ]
    return ", ".join([units.seconds(row.seconds[OURS].median), *marked])


def _filled(mark, known):
    machine, panel = mark["machine"], mark["panel"]
    if machine == "all":
        return f"{mark['begin']}{speed(known)}{mark['end']}"
    if machine not in known or panel not in known[machine].tables:
        raise ValueError(f"the page asks for {machine}: {panel}, which no file has")
    return f"{mark['begin']}{known[machine].tables[panel]}{mark['end']}"


def speed(known: dict[str, File]) -> str:
    """Return the README's table: rows of some panels, of sizes small, middle, large."""
    stem, count = next(of for of in _ON_GPUS if of[0] in known)
    on_gpus = known[stem].panels["collectives"]

    def of_gpus(pattern):
        found = [row["ratio"] for row in on_gpus if re.fullmatch(pattern, row["name"])]
        ends = dict.fromkeys(f"{of(found):.2f}" for of in (min, max) if found)
        return " to ".join(ends)

    def of_cpus(panel, rival):
        rows = {row.payload_bytes: row for row in known["cpu"].panels[panel]
                if row.name == "psum"}  # fmt: skip
        return [f"{rows[size].ratios[rival]:.2f}" for size in (256, 1 << 20, 1 << 24)]

    lines = [
        ("case", "against", "up to 1 KiB", "1 MiB", "16 MiB or more"),
        ("---",) * 5,
        (f"6 collectives on {count} H100s", "`jax.lax`", of_gpus(r"\w+ 1 KiB"),
         of_gpus(r"\w+ 1 MiB"), of_gpus(r"\w+ (16|256) MiB")),
        (f"chain of 50 `psum`s on {count} H100s", "`jax.lax`",
         of_gpus("chain of 50(, command buffers)?"), of_gpus("chain of 50 of 1 MiB"),
         ""),
        ("`psum` on 8 CPU devices", "`jax.lax`", *of_cpus("collectives-8", "jax.lax")),
        ("`psum` between two CPU processes", "gloo", *of_cpus("processes-2", "gloo")),
    ]  # fmt: skip
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _without_files(words):
    """Leave out where results were written to."""
    kept, words = [], iter(words)
    for word in words:
        if word in ("--json", "--plot"):
            next(words)
        elif not word.startswith(("--json=", "--plot=")):
            kept.append(word)
    return kept


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
