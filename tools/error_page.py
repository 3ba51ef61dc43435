"""Check docs/errors.md: the sources can still say its texts, and it has what they say.

`make lint` runs it. Each error says what to do, or the page does.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "errors.md"
VALUE = "\0"  # where a message has a name or a number
# Which of the page's rows, and of C++ the literals: those of one call, joined.
ROW = re.compile(r"^\| `([^`]+)` \|", re.M)
LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')


def of_python(source):
    """Yield the strings of a Python file that are no docstrings, without values."""
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        text = text_of(node)
        if id(node) not in docstrings and text is not None:
            yield text


def text_of(node):
    """Return the text of a literal, without values; None if it is something else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else VALUE
            for part in node.values
        )
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value if is_text else None


def of_cpp(source):
    """Yield the literals of each C++ statement, values between them left out."""
    code = re.sub(r"^\s*//.*$", "", source, flags=re.M)
    code = re.sub(r'"\s*\n\s*"', "", code)  # literals that the compiler joins
    start = 0
    for end in [m.end() for m in re.finditer(r";\s*$", code, re.M)]:
        yield VALUE.join(LITERAL.findall(code[start:end]))
        start = end


def is_said(text, messages):
    """Return whether a message has the parts of a text, in order."""
    parts = [re.escape(part.strip()) for part in text.split("...") if part.strip()]
    pattern = re.compile(".*".join(parts), re.S)
    return any(pattern.search(message) for message in messages)


# How a text says what to do instead.
REMEDY = re.compile(
    r"\b(must|pass|choose|give|use|call|leave|cast|make|split|delete|ask|write|set|send"
    r"|move|expected|name|run|save|start|stack|takes|counts)\b",
    re.I,
)
# Programming errors of whoever adds a file to jaxcomm, and texts made elsewhere.
FOR_DEVELOPERS = (
    "has no attribute",
    f"{VALUE} is {VALUE} now",
    "there is a backend",
    "there is a collective named",
    "has no transpose",
    "does not say its cost",
    "is none of",
    "is not in groups",
    "there is no closed form of",
)


def raised(source):
    """Yield the texts of a Python file's `raise`, values left out.

    Texts that begin with a value and hold little else are put together elsewhere.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for text in filter(None, map(text_of, node.exc.args[:1])):
                if len(text.replace(VALUE, "").split()) > 2:
                    yield text


def unexplained(texts, rows):
    """Return texts that neither a row explains nor say what to do themselves."""
    return [
        text
        for text in texts
        if not REMEDY.search(text)
        and not any(is_said(row, [text]) for row in rows)
        and not any(part in text for part in FOR_DEVELOPERS)
    ]


def faults():
    """Yield what is wrong with the page."""
    text = PAGE.read_text()
    rows = ROW.findall(text)
    lines = [x for x in text.splitlines() if x.startswith("|")]
    lines = [x for x in lines if not x.startswith(("| --", "| text"))]
    if len(rows) != len(lines) or len(set(rows)) != len(rows):
        yield "a row does not begin with a text in backquotes, or is there twice"
    sources = [path.read_text() for path in sorted((ROOT / "jaxcomm").rglob("*.py"))]
    messages = [message for source in sources for message in of_python(source)]
    for path in (ROOT / "ffi").rglob("*.cc"):
        messages += of_cpp(path.read_text())
    messages = [message for message in messages if " " in message]
    for row in rows:
        if len(row.replace("...", "")) < 10:
            yield f"{row!r} is too short to tell messages apart"
        if not is_said(row, messages):
            yield f"no source says {row!r}"
    for text in unexplained([t for source in sources for t in raised(source)], rows):
        yield f"neither the page nor the error says what to do: {text!r}"


def main():
    """Print all faults; return 1 if there are any."""
    found = [f"{PAGE.relative_to(ROOT)}: {fault}" for fault in faults()]
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
