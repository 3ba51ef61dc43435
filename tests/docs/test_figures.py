"""The tables of pages are those of the files that the benchmarks wrote."""

import html
import json
import re
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


def test_a_row_of_figures_is_from_a_file_or_says_where_it_was_measured():
    text = (ROOT / "docs" / "performance.md").read_text()
    _, _, text = text.partition("\n## CPU devices of one process\n")
    measured, _, once = text.partition("\n## Measured once\n")
    by_hand = re.sub(r"<!-- [\w-]+: .*?<!-- end -->", "", measured, flags=re.S)
    assert not re.findall(r"^\|.*", by_hand, re.M)
    for row in once.splitlines():
        if row.startswith("|"):
            assert all(cell.strip() for cell in row.strip("|").split("|")), row


def test_a_picture_says_what_its_file_does(tmp_path):
    """Titles, labels, numbers and captions; their places may follow the fonts.

    The quick ones are drawn anew. Of the others it is the caption.
    """
    document = json.loads((FIGURES / "cpu.json").read_text())
    found = figures.read(FIGURES / "cpu.json")
    made = {path.name for path in FIGURES.glob("*.svg")}
    assert made == {f"cpu-{name}.svg" for name in found.panels}
    for name in made:
        assert {*found.caption.splitlines()} <= {*words(FIGURES / name)}, name
    quick = [row for row in document["rows"] if row["suite"] in ("chain", "scan")]
    (tmp_path / "cpu.json").write_text(json.dumps({**document, "rows": quick}))
    figures.main(tmp_path)
    drawn = sorted(tmp_path.glob("*.svg"))
    assert len(drawn) == 2
    for each in drawn:
        assert words(each) == words(FIGURES / each.name), "make bench-plots"


def words(picture):
    """Return the texts of a picture, of which none is a Python value."""
    found = re.findall(r"<text[^>]*>([^<]*)<", picture.read_text())
    assert not [text for text in found if re.match(r"\w+\(|<", text)], picture.name
    return sorted(map(html.unescape, found))


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
