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
        if id(node) in docstrings:
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                part.value if isinstance(part, ast.Constant) else VALUE
                for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


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
