"""tools/prose.py finds long sentences and bad words, and only in prose."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONG = " ".join(["word"] * 31) + "."
FITS = " ".join(["word"] * 30) + "."
PAGE = f"# Title\n\n```\n{LONG}\n```\n\nA lane? {FITS} `{LONG}` a.\n\n* {LONG}\n"


def test_finds_long_sentences_and_words_to_avoid_in_prose_alone(tmp_path):
    spec = importlib.util.spec_from_file_location("prose", ROOT / "tools" / "prose.py")
    prose = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prose)
    for name, text, said in (
        ("page.md", PAGE, "9: 31 words, at most 30"),
        ("page.md", "A late rank is an error.", "is an error"),
        ("page.md", "One; two.\n\nThree; four.", "3: 2 semicolons on one page"),
        ("code.py", f'"""It.\n\n{LONG}\n"""\nx = "{LONG}"  # {LONG}\n', "3: 31 words"),
    ):
        path = tmp_path / name
        path.write_text(text)
        (fault,) = prose.check(path)
        assert said in fault
