"""Rows of ``bench gpu`` as the tables of a page."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from bench import units
from bench.rows import is_slower

Rows = Sequence[Mapping]

_FORWARD, _GRADIENTS = "forward", ("forward and backward", "with gradients")
_OF_PASS = re.compile(rf"(.+), ({_FORWARD}|{'|'.join(_GRADIENTS)})(?:, (.+))?")
_SIZED = re.compile(r"(\w+) ([\d.]+ (?:[KMG]i)?B)")
_STRATEGIES, _AUTO = "strategies", "auto"
_SHARE = " over the whole sequence, divided by "
_KERNEL = re.compile(r"one (\w+) kernel.*")


def tables(rows: Rows) -> str:
    """Return the rows of one part as Markdown.

    A cell of time has ours, then the time of the other over it; in italics where that
    is below 1 and no share of several GPUs.
    """
    figures = [row for row in rows if row["kind"] == "figure"]
    if any(row["part"] == _STRATEGIES for row in figures):
        return _strategies(figures)
    sized = [row for row in figures if _SIZED.fullmatch(row["name"])]
    others = [row for row in figures if row not in sized]
    passes = [row for row in others if _OF_PASS.fullmatch(row["name"])]
    single = [row for row in others if row not in passes]
    found = [row for row in rows if row["kind"] == "finding" and _is_told(row)]
    made = [_matrix(peer, of) for peer, of in _by(sized, "peer").items()]
    made += [_passes(passes)] if passes else []
    if single:
        lines = [[row["name"], row["peer"], _cell(row)] for row in single]
        made.append(_markdown(["case", "against", "time, ratio"], lines))
    if found:
        lines = [[row["name"], row["found"].replace(";", ",")] for row in found]
        made.append(_markdown(["case", "found"], lines))
    return "\n".join(made)


def _is_told(row):
    """Return whether a finding has numbers, or says why a part has none."""
    return bool(row["values"]) or row["name"] == row["part"]


def _cell(row):
    ratio = f"{row['ratio']:.2f}"
    if is_slower(row["ratio"]) and "divided by" not in row["peer"]:
        ratio = f"*{ratio}*"
    return f"{units.seconds(row['ours'])}, {ratio}"


def _matrix(peer, rows):
    """Return operations below each other, sizes side by side."""
    cells = {_parts(_SIZED, row["name"]): _cell(row) for row in rows}
    sizes = list(dict.fromkeys(size for _, size in cells))
    lines = [
        [f"`{name}`", *(cells.get((name, size), "") for size in sizes)]
        for name in dict.fromkeys(name for name, _ in cells)
    ]
    return _markdown([f"against {_code(peer)}", *sizes], lines)


def _passes(rows):
    """Return cases below each other, forward and with gradients side by side."""
    cases = {}
    for row in rows:
        name, what, more = _parts(_OF_PASS, row["name"])
        name = f"{name}, {more}" if more else name
        cases.setdefault((name, row["peer"]), {})[what == _FORWARD] = _cell(row)
    lines = [
        [name, peer.replace(_SHARE, " / "), of.get(True, ""), of.get(False, "")]
        for (name, peer), of in cases.items()
    ]
    return _markdown(["case", "against", "forward", "with gradients"], lines)


def _strategies(rows):
    """Return cases below each other, strategies side by side."""
    cases = {}
    for row in rows:
        name, what, by = _parts(_OF_PASS, row["name"])
        # The schedule of documents is no strategy.
        by = re.sub(r"^(documents|contiguous) ", "", by)
        cases.setdefault(name, {}).setdefault(by, {})[what] = row
    names = dict.fromkeys(by for of in cases.values() for by in of)
    columns = [by for by in names if by != _AUTO]
    lines = []
    for case, of in cases.items():
        any_of = next(iter(of.values()))
        (kernel,) = _parts(_KERNEL, next(iter(any_of.values()))["peer"])
        alone = _both(any_of, lambda row: units.seconds(row["theirs"]))
        shares = [
            _both(of.get(by, {}), lambda row: f"{row['ratio']:.2f}") for by in columns
        ]
        lines.append([case, f"{kernel}, {alone}", *shares, _auto(of.get(_AUTO, {}))])
    head = ["case", "one kernel / ranks", *map(_code, columns), '`"auto"` takes']
    return _markdown(head, lines)


def _auto(passes):
    """Return what is taken, and the time of the fastest over its."""
    if not passes:
        return ""
    taken = [row["note"].partition(",")[0] for row in passes.values()]
    names = dict.fromkeys(text.removeprefix("auto takes ") for text in taken)
    ratios = _both(passes, lambda row: f"{row['ratio']:.2f}")
    return f"{', '.join(map(_code, names))}: {ratios}"


def _both(passes: Mapping, text: Callable) -> str:
    """Return what is said of the forward pass, and of that with gradients."""
    found = [text(passes[what]) for what in (_FORWARD, *_GRADIENTS) if what in passes]
    return " / ".join(found)


def _parts(pattern, text) -> tuple:
    if not (found := pattern.fullmatch(text)):
        raise ValueError(f"{text!r} is no name of a row in such a table")
    return found.groups()


def _by(rows, field) -> dict[str, list]:
    found = {}
    for row in rows:
        found.setdefault(row[field], []).append(row)
    return found


def _code(text):
    return f"`{text}`" if re.fullmatch(r"[\w.]+", text) else text


def _markdown(head: Sequence[str], lines: Iterator | Sequence) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
