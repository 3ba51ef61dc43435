"""tools/prose.py finds long sentences and bad words, and only in prose."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONG = " ".join(["word"] * 31) + "."
FITS = " ".join(["word"] * 30) + "."


@pytest.fixture
def faults(tmp_path):
    """Gives ``faults(text)``: the faults that the tool finds in a page."""
    spec = importlib.util.spec_from_file_location("prose", ROOT / "tools" / "prose.py")
    prose = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prose)

    def of(text, name="page.md"):
        path = tmp_path / name
        path.write_text(text)
        return [fault.split(":", 1)[1] for fault in prose.check(path)]

    return of


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LONG, "1: 31 words, at most 30"),
        (f"* An item.\n* {LONG}", "31 words"),
        (f"# Title\n\n```\ncode\n```\n\nShort.\n\n{LONG}\n", "9: 31 words"),
        ("A late rank is an error.", "is an error"),
        ("It rises. What is late is lost.", "What is late"),
        ("One; two.\n\nThree; four.", "3: 2 semicolons on one page, at most 1"),
    ],
)
def test_finds_long_sentences_and_words_to_avoid(faults, text, said):
    (fault,) = faults(text)
    assert said in fault


@pytest.mark.parametrize(
    "text",
    [
        f"{FITS} {FITS}",
        f"```python\n{LONG}\n```",
        f"word `{LONG}` word.",
        "What is a lane? Set `deadline=`; it waits.",
    ],
)
def test_leaves_short_sentences_questions_and_code_alone(faults, text):
    assert faults(text) == []


def test_reads_docstrings_and_nothing_else_of_python(faults):
    source = f'''"""Short."""

deadline = "{LONG}"  # {LONG}


def f():
    """Return it.

    Args:
      x: {FITS}
      y: {FITS}

    >>> {LONG}
    {LONG}

    {LONG}
    """
'''
    (fault,) = faults(source, "code.py")
    assert fault.startswith("16: 31 words")
