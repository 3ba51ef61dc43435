"""Every text of docs/errors.md is one that the sources can still say."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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


@pytest.fixture(scope="module")
def messages():
    found = []
    for path in (ROOT / "jaxcomm").rglob("*.py"):
        found += of_python(path.read_text())
    for path in (ROOT / "ffi").rglob("*.cc"):
        found += of_cpp(path.read_text())
    return [message for message in found if " " in message]


def is_said(text, messages):
    """Return whether a message has the parts of a text, in order."""
    parts = [re.escape(part.strip()) for part in text.split("...") if part.strip()]
    pattern = re.compile(".*".join(parts), re.S)
    return any(pattern.search(message) for message in messages)


ROWS = ROW.findall((ROOT / "docs" / "errors.md").read_text())


def test_the_page_has_its_rows():
    lines = (ROOT / "docs" / "errors.md").read_text().splitlines()
    rows = [
        x for x in lines if x.startswith("|") and not x.startswith(("| --", "| text"))
    ]
    assert len(ROWS) == len(rows) > 60
    assert len(set(ROWS)) == len(ROWS)


@pytest.mark.parametrize("text", ROWS)
def test_a_documented_error_is_one_of_the_sources(messages, text):
    assert len(text.replace("...", "")) >= 10, "too short to tell messages apart"
    assert is_said(text, messages)


@pytest.mark.parametrize(
    "text", ["no such words", "is unknown; choose ... backend", "JAXCOMM_CHECK is 2"]
)
def test_a_text_that_no_source_says_is_found(messages, text):
    assert not is_said(text, messages)


def test_messages_of_both_languages_are_read():
    python = 'def f():\n  """No."""\n  raise E(f"a {b} c" "d")'
    cpp = '// "no"\nreturn f("a ", b,\n " c"\n   "d");\n'
    assert f"a {VALUE} cd" in set(of_python(python))
    assert "No." not in set(of_python(python))
    assert list(of_cpp(cpp)) == [f"a {VALUE} cd"]


# How a text says what to do instead.
REMEDY = re.compile(
    r"\b(must|pass|choose|give|use|call|leave|cast|make|split|delete|ask|write|set|send"
    r"|move|expected|name|run|save|start|stack|takes|counts)\b",
    re.I,
)
# Programming errors of whoever adds a file to jaxcomm, and texts made elsewhere.
FOR_DEVELOPERS = (
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


def test_every_error_is_on_the_page_or_says_what_to_do():
    texts = [
        text
        for path in sorted((ROOT / "jaxcomm").rglob("*.py"))
        for text in raised(path.read_text())
    ]
    assert len(texts) > 150
    assert unexplained(texts, ROWS) == []


def test_an_error_that_explains_nothing_is_found():
    source = "raise ValueError(f'{x}: the size is {n}')\nraise E('Pass a size here')"
    texts = list(raised(source))
    assert unexplained(texts, []) == [f"{VALUE}: the size is {VALUE}"]
    assert unexplained(texts, ["the size is ..."]) == []
