"""The pictures and tables of README and performance.md, from what ``--json`` wrote.

``python -m bench.figures FOLDER PAGE...`` reads every JSON file of a folder, one for
each machine. It writes ``MACHINE-PANEL.svg`` beside it, and the tables between the
marks ``<!-- MACHINE: PANEL -->`` and ``<!-- end -->`` of the pages. ``all: speed`` is
the README's.
"""

import json
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from bench import pairs, plot, report, units
from bench.collectives import FLOOR
from bench.gpu import record
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
        for name, rows in found["panels"].items():
            target = path.with_name(f"{path.stem}-{name}.svg")
            with matplotlib.rc_context(_STYLE):
                found["draw"](str(target), rows, found["title"], found["caption"])
            _finish(target)
            print(f"wrote {target}")
    for page in pages:
        text = page.read_text()
        if (new := filled(text, folder)) != text:
            page.write_text(new)
            print(f"wrote {page}")


def filled(text: str, folder: Path) -> str:
    """Return a page with its tables as the files of a folder have them."""
    known = {path.stem: read(path)["panels"] for path in folder.glob("*.json")}
    return _MARK.sub(lambda mark: _filled(mark, known), text)


def _finish(path):
    """Leave out indentation, a third of the file; be dark where the page is."""
    text = re.sub(r"\n +", "\n", path.read_text())
    path.write_text(text.replace("<defs>", f"<style>{_DARK}</style>\n<defs>", 1))


def read(path: Path) -> dict:
    """Return the panels of a file, what draws them, and title and caption.

    Raises:
      ValueError: it is of another schema, or a row is of an unknown form.
    """
    document = json.loads(path.read_text())
    if document.get("schema") != report.SCHEMA:
        raise ValueError(
            f"{path} has schema {document.get('schema')!r} and not {report.SCHEMA}; "
            f"write it anew: make bench ARGS='... --json {path}'"
        )
    is_gpu = "heading" in document
    if is_gpu:
        panels, draw = pairs.panels(record.all_rows(document)), pairs.save
    else:
        rows = [from_json(row) for row in document["rows"]]
        panels, draw = plot.panels(rows), plot.save
    return {
        "panels": panels,
        "draw": draw,
        "title": _title(document),
        "caption": caption(document),
    }


def caption(document: dict) -> str:
    """Return machine, software, command, commit, date and load, in a few lines."""
    versions = ", ".join(f"{name} {of}" for name, of in document["versions"].items())
    load = document["machine"].get("load_average")
    runs = document.get("runs", [{"load_average": load, **document}])
    text = ". ".join([versions, *map(_of_run, runs)])
    return "\n".join(textwrap.wrap(text, 100))


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
    if panel not in known.get(machine, {}):
        raise ValueError(f"the page asks for {machine}: {panel}, which no file has")
    return f"{mark['begin']}{table(known[machine][panel])}{mark['end']}"


def speed(known: dict[str, dict[str, Any]]) -> str:
    """Return the README's table: rows of some panels, of sizes small, middle, large."""
    on_gpus = known["h100-x2"]["collectives"]

    def of_gpus(*ends):
        found = [row["ratio"] for row in on_gpus if row["name"].endswith(ends)]
        return f"{min(found):.2f} to {max(found):.2f}"

    def of_cpus(panel, rival):
        rows = {row.payload_bytes: row for row in known["cpu"][panel]
                if row.name == "psum"}  # fmt: skip
        return [f"{rows[size].ratios[rival]:.2f}" for size in (256, 1 << 20, 1 << 24)]

    lines = [
        ("case", "against", "up to 1 KiB", "1 MiB", "16 MiB or more"),
        ("---",) * 5,
        ("6 collectives on two H100s", "`jax.lax`", of_gpus(" 1 KiB"), "",
         of_gpus(" 256 MiB")),
        ("chain of 50 `psum`s on two H100s", "`jax.lax`",
         of_gpus("chain of 50", "command buffers"), "", ""),
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


def _title(document):
    if "heading" in document:
        ranks, *more = document["heading"]
        return ", ".join([ranks, *more[1:]])  # Without the line of the software.
    machine = document["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores"


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
