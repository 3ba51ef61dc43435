"""docs/performance.md shows the plots and tables that its JSON files give."""

import re
import shutil
from pathlib import Path

import pytest

from bench import figures

DOCS = Path(__file__).parents[2] / "docs"
FILES = sorted((DOCS / "figures").glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_says_machine_command_and_commit(path):
    found = figures.read(path)
    assert re.search(r"Commit [0-9a-f]{7}, \d{4}-\d\d-\d\d, load", found["caption"])
    assert 'make bench ARGS="' in " ".join(found["caption"].split())


def test_plots_are_those_of_the_files_and_all_are_shown(tmp_path):
    """Make them anew. Their bytes depend on matplotlib, and are not compared."""
    shutil.copytree(DOCS / "figures", tmp_path / "figures")
    page = Path(shutil.copy(DOCS / "performance.md", tmp_path))
    for plot in (tmp_path / "figures").glob("*.svg"):
        plot.unlink()
    figures.main(tmp_path / "figures", page)
    drawn = {path.name for path in (tmp_path / "figures").glob("*.svg")}
    assert drawn == {path.name for path in (DOCS / "figures").glob("*.svg")}
    text = (DOCS / "performance.md").read_text()
    assert page.read_text() == text, "run make bench-plots"
    assert drawn == set(re.findall(r"\(figures/([\w.-]+\.svg)\)", text))
    assert FILES
