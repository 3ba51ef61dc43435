"""The tables of pages are those of the files that the benchmarks wrote."""

import html
import re
import shutil
from pathlib import Path

import pytest

from bench import figures

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_a_page_has_the_figures_of_the_files(page):
    text = (ROOT / page).read_text()
    assert "<!-- end -->" in text
    assert figures.filled(text, FIGURES) == text, "make bench-plots"


def test_a_picture_says_what_its_file_does(tmp_path):
    """Titles, labels, numbers and captions; their places may follow the fonts.

    One file is drawn anew. Of the others it is the caption: commit, date and command.
    """
    shutil.copy(FIGURES / "h100-shared.json", tmp_path)
    figures.main(tmp_path)
    drawn = sorted(tmp_path.glob("*.svg"))
    assert drawn
    for each in drawn:
        assert words(each) == words(FIGURES / each.name), "make bench-plots"
    for path in FIGURES.glob("*.json"):
        found = figures.read(path)
        for name in found["panels"]:
            said = words(FIGURES / f"{path.stem}-{name}.svg")
            assert {*found["caption"].splitlines()} <= {*said}, "make bench-plots"


def words(picture):
    """Return the texts of a picture, of which none is a Python value."""
    found = re.findall(r"<text[^>]*>([^<]*)<", picture.read_text())
    assert not [text for text in found if re.match(r"\w+\(|<", text)], picture.name
    return sorted(map(html.unescape, found))


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
