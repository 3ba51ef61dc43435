"""Check the English of Markdown pages and of Python docstrings.

The rules and the paths stand in ``prose.toml``: the most words of a sentence, phrases
to avoid, and how many semicolons a page may have. Code, tables' rules and link targets
are not prose. Exits with 1 and one line for each finding.

    python tools/prose.py [PATH ...]    # If none is given, the paths of prose.toml.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RULES = tomllib.loads((ROOT / "tools" / "prose.toml").read_text())

# A paragraph is the number of its first line and its text.
Paragraph = tuple[int, str]

_ITEM = re.compile(r"\s*(?:[*+-]|\d+\.|#+|>)\s+")
# "name: text" in the Args, Returns and Raises of a docstring.
_ENTRY = re.compile(r"\s*[`\w.,* ]+:(?=\s|$)")
_EXAMPLE = re.compile(r"^ *>>> .*?(?=\n\s*\n|\Z)|(?<=::\n).*?(?=\n\S|\Z)", re.M | re.S)
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|vs|etc|et al|Dr|No)\.$")


def of_markdown(text: str) -> Iterator[Paragraph]:
    """Yield the prose of a Markdown page: paragraphs, items, headings, table cells."""
    text = re.sub(r"<!--.*?-->", _blank, text, flags=re.DOTALL)
    text = re.sub(r"^( *)```.*?^\1```", _blank, text, flags=re.DOTALL | re.MULTILINE)
    for first, lines in _groups(text.splitlines(), _ITEM):
        if lines[0].lstrip().startswith("|"):
            for offset, line in enumerate(lines):
                for cell in line.strip().strip("|").split("|"):
                    yield first + offset, _plain(cell)
        else:
            yield first, _plain(" ".join(lines))


def of_docstrings(source: str) -> Iterator[Paragraph]:
    """Yield the prose of the docstrings of a Python file."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, kinds):
            continue
        docstring = ast.get_docstring(node, clean=False)
        if docstring is None:
            continue
        start = node.body[0].lineno
        docstring = _EXAMPLE.sub(_blank, docstring)
        entry = re.compile(f"{_ITEM.pattern}|{_ENTRY.pattern}")
        for first, lines in _groups(docstring.splitlines(), entry):
            lines[0] = _ENTRY.sub("", lines[0])
            yield start + first - 1, _plain(" ".join(lines))


def findings(paragraphs: Iterable[Paragraph]) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each fault of a paragraph."""
    for line, text in paragraphs:
        for sentence in sentences(text):
            words = sentence.split()
            if len(words) > RULES["most_words"]:
                yield (
                    line,
                    f"{len(words)} words, at most {RULES['most_words']}: "
                    f"{' '.join(words[:8])} ...",
                )
            for phrase, better in RULES["instead"].items():
                if found := re.search(phrase, sentence, re.IGNORECASE):
                    said = " ".join(found[0].split()[:4])
                    yield line, f"{said!r}: {better}"


def sentences(text: str) -> list[str]:
    """Split a paragraph. "e.g. this" and "0.5 us" end no sentence."""
    parts: list[str] = []
    for part in _SENTENCE_END.split(text):
        if parts and _ABBREVIATION.search(parts[-1]):
            parts[-1] += " " + part
        else:
            parts.append(part)
    return [part.strip() for part in parts if part.strip()]


def check(path: Path) -> list[str]:
    """Return the findings of one file, one line each."""
    content = path.read_text()
    if path.suffix == ".py":
        found = list(findings(of_docstrings(content)))
    else:
        paragraphs = list(of_markdown(content))
        found = list(findings(paragraphs))
        semicolons = [line for line, text in paragraphs for _ in range(text.count(";"))]
        if len(semicolons) > RULES["most_semicolons"]:
            found.append(
                (
                    semicolons[RULES["most_semicolons"]],
                    f"{len(semicolons)} semicolons on one page, at most "
                    f"{RULES['most_semicolons']}",
                )
            )
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return [f"{name}:{line}: {fault}" for line, fault in sorted(found)]


def files(paths: Iterable[str]) -> Iterator[Path]:
    """Yield the files that the paths name, folders with all that is in them.

    Raises:
      FileNotFoundError: a path does not exist.
    """
    for path in (ROOT / name for name in paths):
        if not path.exists():
            raise FileNotFoundError(f"prose: there is no {path}; see tools/prose.toml")
        if path.is_dir():
            yield from sorted(p for p in path.rglob("*") if p.suffix in (".md", ".py"))
        else:
            yield path


def _groups(lines: list[str], opens: re.Pattern) -> Iterator[tuple[int, list[str]]]:
    """Yield runs of lines without a blank one; a match of ``opens`` begins another."""
    group: list[str] = []
    first = 1
    for number, line in enumerate([*lines, ""], 1):
        is_table = line.lstrip().startswith("|")
        was_table = bool(group) and group[0].lstrip().startswith("|")
        starts = opens.match(line) or is_table != was_table
        if group and (not line.strip() or starts):
            yield first, group
            group = []
        if line.strip():
            first = first if group else number
            group.append(line.strip())


def _plain(text: str) -> str:
    """Return text as it is read: code is one word, a link is its text."""
    text = re.sub(r"``?[^`]+``?", "`code`", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r":\w+:(?=`)", "", text)
    text = _ITEM.sub("", text, count=1) if _ITEM.match(text) else text
    return re.sub(r"\*\*|__", "", text).strip(" :-")


def _blank(match: re.Match) -> str:
    """Return as many empty lines as were matched, so that line numbers hold."""
    return "\n" * match[0].count("\n")


def main(arguments: list[str]) -> int:
    """Print the findings; return 1 if there is one."""
    found = [
        fault for path in files(arguments or RULES["paths"]) for fault in check(path)
    ]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
