"""The tables of pages are those of the files that the benchmarks wrote."""

from pathlib import Path

import pytest

from bench import figures

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_a_page_has_the_figures_of_the_files(page):
    text = (ROOT / page).read_text()
    assert "<!-- end -->" in text
    assert figures.filled(text, ROOT / "docs" / "figures") == text, "make bench-plots"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
