"""tools/prose.py finds long sentences and bad words, and only in prose."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def prose():
    spec = importlib.util.spec_from_file_location("prose", ROOT / "tools" / "prose.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LONG = " ".join(["word"] * 31) + "."
FITS = " ".join(["word"] * 30) + "."


def faults(prose, text, tmp_path, name="page.md"):
    path = tmp_path / name
    path.write_text(text)
    return [fault.split(":", 1)[1] for fault in prose.check(path)]


@pytest.mark.parametrize(
    "text",
    [
        LONG,
        f"* An item.\n* {LONG}",
        f"One two. {LONG} Three four.",
        f"| cell | {LONG} |",
        f"# {LONG}",
        "word\n" * 31,
        f"[{LONG[:-1]}](page.md).",
    ],
)
def test_finds_sentences_that_are_too_long(prose, text, tmp_path):
    (fault,) = faults(prose, text, tmp_path)
    assert "31 words, at most 30" in fault


@pytest.mark.parametrize(
    "text",
    [
        FITS,
        f"{FITS} {FITS}",
        f"```python\n{LONG}\n```",
        f"* {FITS}\n* {FITS}",
        f"| {FITS} | {FITS} |",
        f"<!-- {LONG} -->",
        f"word `{LONG}` word.",
        f"{FITS}\n\n{FITS}",
        f"{FITS} (An aside.) `code` begins here, {FITS}"[: len(FITS) * 2],
    ],
)
def test_leaves_short_sentences_and_code_alone(prose, text, tmp_path):
    assert faults(prose, text, tmp_path) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A late rank is an error.", "is an error"),
        ("Who waits for a rank raises.", "Who waits"),
        ("Others are told\nat once.", "are told"),
        ("It waits until the deadline.", "deadline"),
        ("It rises. What is late is lost.", "What is late"),
    ],
)
def test_finds_words_to_avoid(prose, text, said, tmp_path):
    (fault,) = faults(prose, text, tmp_path)
    assert said in fault


def test_allows_questions_and_words_in_code(prose, tmp_path):
    assert faults(prose, "What is a lane? Set `deadline=`.", tmp_path) == []


def test_counts_semicolons_of_a_page(prose, tmp_path):
    assert faults(prose, "One; two.", tmp_path) == []
    (fault,) = faults(prose, "One; two.\n\nThree; four.", tmp_path)
    assert fault == "3: 2 semicolons on one page, at most 1"


def test_says_the_line(prose, tmp_path):
    text = f"# Title\n\n```\ncode\n```\n\nShort.\n\n{LONG}\n"
    (fault,) = faults(prose, text, tmp_path)
    assert fault.startswith("9: ")


def test_reads_docstrings_and_nothing_else_of_python(prose, tmp_path):
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
    (fault,) = faults(prose, source, tmp_path, "code.py")
    assert fault.startswith("16: 31 words")


def test_the_paths_of_the_configuration_pass(prose, capsys):
    status = prose.main([])
    assert (status, capsys.readouterr().out) == (0, "")


def test_a_path_that_does_not_exist_is_refused(prose):
    with pytest.raises(FileNotFoundError, match="there is no"):
        prose.main(["no/such/page.md"])
